"""Worker: whole RL steps with our engine and trainer: sample groups, reward them, update, publish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rl_task import PROMPT_TOKENS, Clock, prompts, report, reward, settings

from etude.config import LossConfig, OptimizerConfig, RlConfig
from etude.inference import Engine
from etude.model.huggingface import load_model
from etude.model.kernels.invariant import InvariantOps
from etude.records import (
    Group,
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
from etude.weights import MemoryWeights


class Loop:
    """One run: an engine and a trainer, and the exchange of groups and weights between them."""

    def __init__(self, asked: dict[str, Any]) -> None:
        model = load_model(Path(asked["checkpoint"]))
        self.group_size, self.seed = asked["group_size"], asked["seed"]
        self.length = PROMPT_TOKENS + asked["completion_tokens"]
        self.params = SamplingParams(max_tokens=asked["completion_tokens"])
        self.weights, self.blobs = MemoryWeights(), MemoryBlobs()
        config = RlConfig(
            num_steps=asked["steps"],
            groups_per_step=asked["groups"],
            group_size=self.group_size,
            updates_per_step=1,
            loss=LossConfig(kind="clip", clip_high=0.2, constant_tokens=asked["completion_tokens"]),
            optimizer=OptimizerConfig(
                learning_rate=asked["learning_rate"],
                beta2=0.999,
                clip_norm=1.0,
                warmup_steps=0,
                decay_share=0.0,
            ),
        )
        self.trainer = RlTrainer(model, config, "bench", self.weights, self.blobs.get)
        rows = asked["groups"] * self.group_size
        if asked.get("invariant"):
            model.ops = InvariantOps()
        self.largest_difference = 0.0
        """Largest difference between engine and trainer log-probabilities of sampled tokens."""
        self.engine = Engine(
            model.config,
            model.vocab_size,
            rows,
            self.length,
            kernels="native",
            native_threads=asked["threads"],
        )
        self.publish()

    def publish(self) -> None:
        """Copies the trainer's weights into the engine."""
        manifest = self.trainer.publish()
        self.engine.stage(manifest.version, self.weights.fetch(manifest))
        self.engine.activate(manifest.version)

    def sample(self, step: int, given: list[list[int]]) -> dict[str, Segment]:
        """Samples a group of answers to each prompt, all concurrently."""
        asked = {
            f"{step}:{prompt}:{member}": np.array(tokens, dtype=np.int32)
            for prompt, tokens in enumerate(given)
            for member in range(self.group_size)
        }
        for name, tokens in asked.items():
            self.engine.submit(
                SampleRequest(name, name, tokens, self.params, frozenset(), (self.seed, *name.encode()))
            )
        segments: dict[str, Segment] = {}
        while len(segments) < len(asked):
            for answer in self.engine.step(most_steps=64):
                name = answer.request.id
                segments[name] = self._segment(name, asked[name], answer.chunks)
                self.engine.close(name)
        return segments

    def _segment(self, name: str, prompt: NDArray[np.int32], chunks: Sequence[SampleChunk]) -> Segment:
        tokens = np.concatenate([prompt, *(chunk.tokens for chunk in chunks)])
        logprobs = np.zeros(self.length, dtype=np.float32)
        logprobs[PROMPT_TOKENS:] = np.concatenate([chunk.logprobs for chunk in chunks])
        found = [(chunk.routes_start, chunk.routes) for chunk in chunks if chunk.routes is not None]
        routes = np.full((self.length, *found[0][1].shape[1:]), 255, dtype=np.uint8)
        for start, some in found:  # the last token is never computed, so it has no experts
            routes[start : start + len(some)] = some
        span = (VersionSpan(0, self.length, chunks[-1].version),)
        sampled = np.arange(self.length) >= PROMPT_TOKENS
        kept = self.blobs.put(routes)
        return Segment(name, name, tokens, sampled, logprobs, span, span, (), self.params, "t", "t", kept)

    def step(self, number: int, given: list[list[int]]) -> float:
        """One whole step; returns the mean reward."""
        segments, vocab_size = self.sample(number, given), self.engine.model.vocab_size
        groups: list[Group] = []
        earned: list[float] = []
        for prompt in range(len(given)):
            members: list[Trajectory] = []
            for member in range(self.group_size):
                segment = segments[f"{number}:{prompt}:{member}"]
                earned.append(reward(segment.tokens[PROMPT_TOKENS:].tolist(), vocab_size))
                identity = TrajectoryId("bench", str(prompt), number, prompt, member)
                graded = RewardBreakdown(earned[-1])
                members.append(Trajectory(identity, (segment,), (), Status.DONE, reward=graded))
            groups.append(Group(f"{number}:{prompt}", "task", self.group_size, tuple(members)))
        metrics = self.trainer.step(groups)
        self.largest_difference = max(self.largest_difference, metrics["parity_max"])
        self.publish()
        for segment in segments.values():
            assert segment.routes is not None
            self.blobs.discard(segment.routes)
        return sum(earned) / len(earned)


def main() -> None:
    """Runs the requested steps with the same prompts as TRL's worker."""
    asked = settings()
    torch.set_num_threads(asked["threads"])
    loop = Loop(asked)
    drawn = prompts(asked["seed"], asked["groups"] * asked["steps"], loop.engine.model.vocab_size)
    rewards: list[float] = []
    clock = Clock()
    for step in range(asked["steps"]):
        rewards.append(loop.step(step, drawn[step * asked["groups"] : (step + 1) * asked["groups"]]))
        clock.lap()
    tokens = asked["groups"] * asked["group_size"] * loop.length
    report(clock, rewards, largest_difference=loop.largest_difference, tokens_per_step=tokens)


if __name__ == "__main__":
    main()
