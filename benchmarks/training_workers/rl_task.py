"""The single-turn task of both workers. Standard library only, since both environments import it.

A prompt has eight tokens, an answer a fixed number; the reward is the share of the answer's tokens in the
lower quarter of the vocabulary.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

PROMPT_TOKENS = 8


def prompts(seed: int, count: int, vocab_size: int) -> list[list[int]]:
    """Prompts of one run, in order; the first two token ids are reserved for padding and the end."""
    draw = random.Random(seed)
    return [[draw.randrange(2, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def reward(tokens: list[int], vocab_size: int) -> float:
    """Share of `tokens` in the lower quarter."""
    return sum(token < vocab_size // 4 for token in tokens) / len(tokens)


def settings() -> dict[str, Any]:
    """The worker's settings: JSON in its first argument."""
    return json.loads(sys.argv[1])


class Clock:
    """Wall and processor seconds of each step."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"times_s": [], "processor_s": []}
        self.restart()

    def restart(self) -> None:
        """Starts the first step."""
        self._began = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        """Ends a step and starts the next."""
        self.times["times_s"].append(time.perf_counter() - self._began[0])
        self.times["processor_s"].append(time.process_time() - self._began[1])
        self.restart()


def report(clock: Clock, rewards: list[float], **more: float) -> None:
    """Prints one line of JSON for the benchmark: seconds and mean reward of each step."""
    print(json.dumps({**clock.times, "rewards": rewards, **more}), flush=True)
