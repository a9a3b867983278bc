"""The packed training step against transformers' Qwen3MoeForCausalLM: same weights, data and optimiser."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import Figures, median_ratio
from numpy.typing import NDArray

from etude.config import ModelConfig
from etude.model import build_model
from etude.model.huggingface import load_model, save_model
from etude.model.scoring import PackedSequences, packed_logprobs

Sequences = list[NDArray[np.int32]]
MODELS: Mapping[str, tuple[ModelConfig, int]] = {
    "tiny": (ModelConfig(max_positions=1024), 1024),
    "small": (
        ModelConfig(
            hidden_size=256,
            num_layers=4,
            num_heads=8,
            num_kv_heads=4,
            num_experts=16,
            experts_per_token=4,
            expert_size=192,
            max_positions=1024,
        ),
        4096,
    ),
}
"""The quickstart's model, and one of 14 M parameters in which matrix products take a larger share."""
EXPERTS = ("grouped_mm", "eager")
"""transformers' implementations of experts. (`batched_mm` copies weights for each token: minutes.)"""
_NUM_SEQUENCES = 16
_LEARNING_RATE = 1e-5


def ragged(vocab_size: int, seed: int) -> Sequences:
    """Sequences with lengths like those of agent sessions: lognormal, median 200, up to 640."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(5.3, 0.8, _NUM_SEQUENCES), 16, 640).astype(int)
    return [generator.integers(0, vocab_size, length).astype(np.int32) for length in lengths]


def equal(vocab_size: int, seed: int) -> Sequences:
    """The same number of sequences, all of 256 tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, 256).astype(np.int32) for _ in range(_NUM_SEQUENCES)]


class Ours:
    """Our step: all sequences packed into one pass."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = load_model(checkpoint)
        self._optimizer = _adamw(self._model)

    def step(self, sequences: Sequences) -> float:
        """One training step: forward, backward, optimiser; returns the mean loss per token."""
        batch = PackedSequences.pack(sequences)
        inside = torch.ones(len(batch.tokens), dtype=torch.bool)
        inside[batch.starts] = False
        loss = -packed_logprobs(self._model, batch, inside.nonzero().flatten())[0].mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


class Transformers:
    """transformers' step: padded, all sequences in one pass, or in passes of sequences of similar length."""

    def __init__(self, checkpoint: Path, experts: str, per_pass: int) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
        )
        self._model.train()
        self._optimizer = _adamw(self._model)
        self._per_pass = per_pass

    def step(self, sequences: Sequences) -> float:
        """See Ours.step."""
        total, num_targets = 0.0, sum(len(tokens) - 1 for tokens in sequences)
        ordered = sorted(sequences, key=len)
        for first in range(0, len(ordered), self._per_pass):
            part = ordered[first : first + self._per_pass]
            ids = torch.zeros((len(part), len(part[-1])), dtype=torch.int64)
            mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
            for row, tokens in enumerate(part):
                ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
                mask[row, : len(tokens)] = 1
                labels[row, : len(tokens)] = ids[row, : len(tokens)]
            padded = None if bool(mask.all()) else mask
            output = self._model(
                input_ids=ids,
                attention_mask=padded,
                labels=labels,
                num_items_in_batch=num_targets,
                use_cache=False,
            )
            output.loss.backward()
            total += float(output.loss.detach())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


@dataclass(frozen=True, slots=True)
class Timed:
    """Wall and processor time of one step."""

    wall_s: float
    processor_s: float


def step_figures(rounds: int, models: Sequence[str]) -> tuple[Figures, dict[str, Any]]:
    """Ratios of tokens per second for every model and kind of batch; unprefixed: the worse model's."""
    transformers.utils.logging.disable_progress_bar()
    figures: Figures = {}
    peers: dict[str, Any] = {}
    for name in models:
        config, vocab_size = MODELS[name]
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = Path(directory)
            model = build_model(config, vocab_size)
            model.initialise(0)
            save_model(model, checkpoint)
            found, labels = _compare(checkpoint, vocab_size, rounds)
        figures |= {f"{name}_{key}": value for key, value in found.items()}
        peers |= {f"{name}_{key}": value for key, value in labels.items()}
    for kind in ("ragged", "ragged_by_length", "equal"):
        key = f"tokens_vs_transformers_{kind}"
        figures[key] = min(figures[f"{name}_{key}"] for name in models)
    return figures, peers


def _compare(checkpoint: Path, vocab_size: int, rounds: int) -> tuple[Figures, dict[str, str]]:
    figures: Figures = {}
    chosen: dict[str, str] = {}
    kinds: dict[str, tuple[Callable[[int, int], Sequences], int]] = {
        "ragged": (ragged, _NUM_SEQUENCES),
        "ragged_by_length": (ragged, _NUM_SEQUENCES // 4),
        "equal": (equal, _NUM_SEQUENCES),
    }
    for kind, (make, per_pass) in kinds.items():
        ours = Ours(checkpoint)
        theirs = {experts: Transformers(checkpoint, experts, per_pass) for experts in EXPERTS}
        first = make(vocab_size, 0)
        trials = {experts: [_time(peer, first)[0] for _ in range(2)][1] for experts, peer in theirs.items()}
        best = min(trials, key=lambda experts: trials[experts].processor_s)
        peer = Transformers(checkpoint, best, per_pass)
        pairs: list[tuple[Timed, Timed]] = []
        for number in range(rounds + 1):
            sequences = make(vocab_size, number)
            (own, loss), (their, their_loss) = _time(ours, sequences), _time(peer, sequences)
            if abs(loss - their_loss) > 1e-3:
                raise RuntimeError(f"losses differ: ours {loss}, transformers' {their_loss}")
            pairs.append((own, their))
        del pairs[0]
        key = f"tokens_vs_transformers_{kind}"
        figures[key] = median_ratio([b.wall_s for _, b in pairs], [a.wall_s for a, _ in pairs])
        figures[f"{key}_processor"] = median_ratio(
            [b.processor_s for _, b in pairs], [a.processor_s for a, _ in pairs]
        )
        figures[f"{kind}_step_processor_s"] = statistics.median(a.processor_s for a, _ in pairs)
        chosen[key] = f"sdpa, {best}"
    return figures, chosen


def _time(side: Ours | Transformers, sequences: Sequences) -> tuple[Timed, float]:
    wall, processor = time.perf_counter(), time.process_time()
    loss = side.step(sequences)
    return Timed(time.perf_counter() - wall, time.process_time() - processor), loss


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
