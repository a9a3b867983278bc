"""Models and workloads of the inference benchmark, as files that every peer can read."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks.load import LoadSession, LogNormal, WorkloadShape, synthetic_sessions

from etude.config import ModelConfig
from etude.model import build_model
from etude.model.huggingface import save_model

_STEP_TOKENS = 16
"""Page size to which token limits are rounded up."""
LARGE = ModelConfig(
    architecture="qwen3",
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=2560,
    max_positions=4096,
)
"""102 million parameters with its vocabulary of 16,384: arithmetic and memory dominate, not dispatch."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model and the sessions that are played on it."""

    name: str
    config: ModelConfig
    vocab_size: int
    shape: WorkloadShape
    seconds_per_turn: float
    """Time limit per turn of the workload; a slower peer is absent."""
    checkpoint: Path | None = None
    """Source of the weights; None: random ones of seed 0."""

    def write_checkpoint(self, directory: Path) -> None:
        """Writes the weights in Hugging Face's format."""
        if self.checkpoint is not None:
            shutil.copytree(self.checkpoint, directory)
            return
        model = build_model(self.config, self.vocab_size)
        model.initialise(0)
        save_model(model, directory)

    def sessions(self, seed: int, turns: int | None = None) -> list[LoadSession]:
        """Sessions with different lengths and tokens for each seed, so that no cache carries over to the next
        round. `turns`: only the first so many of each session."""
        return [replace(one, turns=one.turns[:turns]) for one in synthetic_sessions(self.shape, seed)]

    def write_workload(self, seed: int, path: Path, turns: int | None = None) -> None:
        """Writes inputs and output lengths of every turn."""
        sessions = self.sessions(seed, turns)
        path.write_text(json.dumps(as_json(sessions, self.vocab_size, seed)), encoding="utf-8")


def as_json(sessions: list[LoadSession], vocab_size: int, seed: int) -> list[list[dict[str, object]]]:
    """The workers' workload format: per turn uniformly random `input` tokens and the `output` length."""
    generator = np.random.default_rng((seed, 1))
    return [
        [
            {
                "input": generator.integers(0, vocab_size, turn.input_tokens).tolist(),
                "output": turn.output_tokens,
            }
            for turn in session.turns
        ]
        for session in sessions
    ]


def longest_tokens(sessions: list[LoadSession]) -> int:
    """Final length of the longest session, rounded up to pages, plus one page."""
    longest = max(sum(turn.input_tokens + turn.output_tokens for turn in s.turns) for s in sessions)
    return (longest // _STEP_TOKENS + 2) * _STEP_TOKENS


def scenarios(quick: bool) -> dict[str, Scenario]:
    """The two small models on the issue's workload, and a larger one on a shorter workload."""
    small = WorkloadShape(num_sessions=4, turns=LogNormal(2, 2)) if quick else WorkloadShape()
    large = WorkloadShape(
        num_sessions=2 if quick else 8,
        turns=LogNormal(2, 2) if quick else LogNormal(3, 3),
        prompt_tokens=(100, 300),
        output_tokens=LogNormal(24, 100),
        observation_tokens=(20, 80),
    )
    moe, dense = ModelConfig(max_positions=8192), ModelConfig(architecture="qwen3", max_positions=8192)
    return {
        "moe": Scenario("moe", moe, 1024, small, 120.0),
        "dense": Scenario("dense", dense, 1024, small, 120.0),
        "large": Scenario("large", LARGE, 16_384, large, 200.0),
    }
