"""The same RL run with an exact engine and with inexact ones.

The task: read symbols, write each one's partner. A small mixture of experts first learns it from examples,
half of them wrong, so that it is right half of the time; RL has to raise that to always. All arms start from
the same weights and, for a seed, have the same prompts and noise; they differ in the engine's error and in
the trainer's correction of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig, RlConfig
from etude.inference import Engine
from etude.model import LanguageModel, build_model
from etude.model.kernels.invariant import InvariantOps
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.records import (
    Group,
    PolicyVersion,
    RewardBreakdown,
    SampleChunk,
    SampleRequest,
    SamplingParams,
    Segment,
    Status,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from etude.store.blobs import MemoryBlobs
from etude.training import RlTrainer
from etude.training.parity import compare_logprobs
from etude.weights import MemoryWeights

SYMBOLS, LENGTH = 24, 12
VOCAB = 32
_START, _MIDDLE = 30, 31
_CONFIG = ModelConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=16,
    experts_per_token=2,
    expert_size=32,
    max_positions=64,
)
_GROUPS, _GROUP_SIZE = 8, 8
_HELDOUT = 64
_EVERY = 5
"""Steps between two evaluations."""
_WRONG = 0.5
"""Share of wrong symbols in the examples."""


@dataclass(frozen=True, slots=True)
class Arm:
    """An experimental arm: the engine's error, and the trainer's correction."""

    bits: int = 0
    """Bits to which the engine's weights are rounded; 0: not rounded."""
    router_noise: float = 0.0
    """Noise added to the engine's routers at each publication, in standard deviations of their weights: such
    an engine chooses other experts but computes them exactly."""
    replay: bool = True
    """Whether the trainer replays the engine's choice of experts."""
    engine_logprobs: bool = True
    """Whether the trainer uses the engine's log-probabilities of the sampled tokens; otherwise its own, as
    trainers do that recompute them."""
    tis_cap: float = 0.0
    """Cap of the truncated importance weights between engine and trainer policy; 0: no weights, only the
    ratio in the loss."""

    @property
    def exact(self) -> bool:
        """Whether the engine computes exactly as the trainer."""
        return not self.bits and not self.router_noise


ENGINES: Mapping[str, Arm] = {
    "router noise 0.3": Arm(router_noise=0.3),
    "router noise 1": Arm(router_noise=1.0),
    "8 bits": Arm(bits=8),
    "3 bits": Arm(bits=3),
}
"""Engine errors: with 8 bits an engine passes the parity gate; the others exceed it so far that the effect
shows within a minute."""
TREATMENTS: Mapping[str, Mapping[str, Any]] = {
    "nothing": {"replay": False, "engine_logprobs": False},
    "ratio": {"replay": False},
    "TIS": {"replay": False, "tis_cap": 2.0},
    "replay, ratio": {},
    "replay, TIS": {"tis_cap": 2.0},
}
"""The trainer's corrections."""
EXACT = "exact"
ARMS: Mapping[str, Arm] = {EXACT: Arm()} | {
    f"{engine}: {treatment}": replace(arm, **changes)
    for engine, arm in ENGINES.items()
    for treatment, changes in TREATMENTS.items()
}


@dataclass(frozen=True, slots=True)
class Curve:
    """The learning curve of one run."""

    steps: list[int]
    accuracy: list[float]
    """Share of right symbols on unseen prompts, sampled by the exact model."""
    k3: list[float]
    """k3 divergence of trainer and engine on the sampled tokens of each step."""
    elapsed_s: float

    @property
    def end(self) -> float:
        """Share of right symbols at the end: the mean of the last three evaluations."""
        return float(np.mean(self.accuracy[-3:]))


def partners() -> NDArray[np.int32]:
    """[SYMBOLS] each symbol's partner."""
    return np.random.default_rng(9).permutation(SYMBOLS).astype(np.int32)


def prompts(count: int, seed: int) -> NDArray[np.int32]:
    """[count, LENGTH + 2]"""
    symbols = np.random.default_rng((17, seed)).integers(0, SYMBOLS, (count, LENGTH))
    ends = np.full((count, 1), _START), np.full((count, 1), _MIDDLE)
    return np.concatenate((ends[0], symbols, ends[1]), axis=1).astype(np.int32)


@functools.cache
def initial_weights(num_steps: int) -> Mapping[str, Tensor]:
    """Weights after supervised training on `num_steps` batches of examples."""
    torch.manual_seed(0)
    model = build_model(_CONFIG, VOCAB)
    model.initialise(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = np.random.default_rng(3)
    for step in range(num_steps):
        given = prompts(64, 1_000_000 + step)
        answers = partners()[given[:, 1:-1]]
        wrong = rng.random(answers.shape) < _WRONG
        answers = np.where(wrong, rng.integers(0, SYMBOLS, answers.shape), answers).astype(np.int32)
        batch = PackedSequences.pack(list(np.concatenate((given, answers), axis=1)))
        rows = torch.arange(len(batch.tokens)).view(64, -1)[:, LENGTH + 2 :].flatten()
        logprobs, _ = packed_logprobs(model, batch, rows)
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def learn(name: str, seed: int, num_steps: int, first: Mapping[str, Tensor], rate: float) -> Curve:
    """Trains one run of an arm."""
    return _Run(ARMS[name], seed, num_steps, first, rate).train()


class _Run:
    def __init__(self, arm: Arm, seed: int, num_steps: int, first: Mapping[str, Tensor], rate: float) -> None:
        self.arm, self.seed, self.num_steps = arm, seed, num_steps
        self.model = _model_with(first)
        if arm.exact:
            self.model.ops = InvariantOps()
        self.blobs = MemoryBlobs()
        config = RlConfig.model_validate(
            {
                "num_steps": num_steps,
                "groups_per_step": _GROUPS,
                "group_size": _GROUP_SIZE,
                "updates_per_step": 1,
                "router_replay": "r3" if arm.replay else "off",
                "loss": {
                    "kind": "cispo",
                    "normalizer": "tokens",
                    "correction": {"tis_cap": arm.tis_cap},
                },
                "optimizer": {"learning_rate": rate, "warmup_steps": 0, "decay_share": 0.0},
            }
        )
        self.trainer = RlTrainer(self.model, config, "parity", MemoryWeights(), self.blobs.get)
        self.engine = _new_engine()
        self.exact_engine = _new_engine()
        self.k3: list[float] = []
        self._noise = torch.Generator().manual_seed(seed)

    def train(self) -> Curve:
        began = time.perf_counter()
        curve = Curve([], [], self.k3, 0.0)
        for step in range(self.num_steps + 1):
            if step % _EVERY == 0:
                curve.steps.append(step)
                curve.accuracy.append(self._accuracy())
            if step < self.num_steps:
                self.trainer.step(self._collect(step))
        return Curve(curve.steps, curve.accuracy, self.k3, time.perf_counter() - began)

    def _collect(self, step: int) -> list[Group]:
        version = self._serve(self.engine, self.arm)
        given = np.repeat(prompts(_GROUPS, 10_000 * self.seed + step), _GROUP_SIZE, axis=0)
        chunks = _sample(self.engine, list(given), (self.seed, step))
        tokens = [np.concatenate((p, c.tokens)) for p, c in zip(given, chunks, strict=True)]
        own = [scores.logprobs for scores in self.trainer.score(tokens)]
        first = LENGTH + 2
        sampled = [np.concatenate((np.zeros(1, np.float32), c.logprobs)) for c in chunks]
        self.k3.append(compare_logprobs([one[first - 1 :] for one in own], sampled).k3)
        members = [
            self._member(f"{step}/{number}", tokens[number], chunk, own[number], version)
            for number, chunk in enumerate(chunks)
        ]
        return [
            Group(f"{step}/{g}", "task", _GROUP_SIZE, tuple(members[g * _GROUP_SIZE : (g + 1) * _GROUP_SIZE]))
            for g in range(_GROUPS)
        ]

    def _member(
        self,
        name: str,
        tokens: NDArray[np.int32],
        chunk: SampleChunk,
        own: NDArray[np.float32],
        version: PolicyVersion,
    ) -> Trajectory:
        first, length = LENGTH + 2, len(tokens)
        logprobs = np.zeros(length, dtype=np.float32)
        logprobs[first:] = chunk.logprobs if self.arm.engine_logprobs else own[first:]
        assert chunk.routes is not None and chunk.routes_start == 0
        routes = np.concatenate((chunk.routes, chunk.routes[-1:]))  # the last token's are never used
        segment = Segment(
            id=name,
            trajectory_id=name,
            tokens=tokens,
            sampled=np.arange(length) >= first,
            logprobs=logprobs,
            version_spans=(VersionSpan(0, length, version),),
            kv_oldest_spans=(VersionSpan(0, length, version),),
            turn_spans=(),
            sampling=SamplingParams(max_tokens=LENGTH),
            tokenizer_digest="parity",
            template_digest="parity",
            routes=self.blobs.put(routes),
        )
        right = float(np.mean(tokens[first:] == partners()[tokens[1 : first - 1]]))
        step, number = (int(part) for part in name.split("/"))
        identity = TrajectoryId("parity", f"t{step}-{number // _GROUP_SIZE}", 0, step, number)
        return Trajectory(identity, (segment,), (), Status.DONE, reward=RewardBreakdown(right))

    def _accuracy(self) -> float:
        self._serve(self.exact_engine, ARMS[EXACT])
        given = prompts(_HELDOUT, 77_777_777)
        chunks = _sample(self.exact_engine, list(given), (123,))
        answers = np.stack([chunk.tokens for chunk in chunks])
        return float(np.mean(answers == partners()[given[:, 1:-1]]))

    def _serve(self, engine: Engine, arm: Arm) -> PolicyVersion:
        version = self.trainer.publish().version
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.model.named_parameters():
            tensors[name] = to_few_bits(tensor, arm.bits) if arm.bits else tensor.detach()
            if arm.router_noise and name.endswith(".router"):
                tensors[name] = with_noise(tensor, arm.router_noise, self._noise)
        engine.stage(version, tensors)
        engine.activate(version, "recompute")
        return version


@torch.no_grad()
def to_few_bits(tensor: Tensor, bits: int) -> Tensor:
    """Matrices rounded to integers of `bits` bits with one scale per row; vectors unchanged."""
    if tensor.ndim < 2:
        return tensor.detach()
    largest = 2 ** (bits - 1) - 1
    scale = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
    return (tensor / scale).round() * scale


@torch.no_grad()
def with_noise(tensor: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """The tensor plus normal noise of `size` standard deviations of its own values."""
    return tensor + size * tensor.std() * torch.randn(tensor.shape, generator=generator)


def _model_with(weights: Mapping[str, Tensor]) -> LanguageModel:
    model = build_model(_CONFIG, VOCAB)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def _new_engine() -> Engine:
    return Engine(_CONFIG, VOCAB, _GROUPS * _GROUP_SIZE, 2 * LENGTH + 3, kernels="native")


def sample_on(engine: Engine, given: Sequence[NDArray[np.int32]], num_tokens: int) -> list[NDArray[np.int32]]:
    """Each prompt followed by `num_tokens` sampled tokens."""
    chunks = _sample(engine, given, (0,), num_tokens)
    return [np.concatenate((prompt, chunk.tokens)) for prompt, chunk in zip(given, chunks, strict=True)]


def _sample(
    engine: Engine, given: Sequence[NDArray[np.int32]], key: tuple[int, ...], num_tokens: int = LENGTH
) -> list[SampleChunk]:
    """The sampled chunk of each prompt."""
    params = SamplingParams(max_tokens=num_tokens)
    for number, prompt in enumerate(given):
        session = f"s{number}"
        engine.close(session)
        engine.submit(SampleRequest(session, session, prompt, params, frozenset(), (*key, number)))
    answers: dict[str, SampleChunk] = {}
    while engine.has_work:
        for answer in engine.step():
            (answers[answer.request.id],) = answer.chunks
    return [answers[f"s{number}"] for number in range(len(given))]
