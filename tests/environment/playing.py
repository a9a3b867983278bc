"""Episodes with a scripted policy, for the tests of everything above the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from etude.agent import SessionLimits, core_registry
from etude.config import RewardConfig
from etude.environment.episodes import Environment, EpisodeLimits
from etude.records import SamplingParams, Task, ToolCall, Trajectory, TrajectoryId
from etude.sandbox.interface import SandboxBackend
from etude.store.blobs import MemoryBlobs
from etude.tokens import ETUDE_TEMPLATE, Renderer, train_tokenizer
from etude.tokens.grammar import XmlGrammar
from etude_quickstart.memory_backend import MemoryBackend
from tests.fakes.scripted import ScriptedSampler

Tokens = NDArray[np.int32]
Turn = Sequence[ToolCall | str]

_HIDDEN = """from lib.tally import tally


def test_tally():
    assert tally([1, 2, 3]) == 6
    assert tally([5]) == 5
"""
_VISIBLE = "from lib.tally import tally\n\n\ndef test_tally():\n    assert tally([4]) == 4\n"
TASK = Task(
    id="tally",
    instruction="test_tally fails",
    files={
        "lib/tally.py": "def tally(xs):\n    return sum(xs) - 1\n",
        "tests/test_all.py": _VISIBLE,
    },
    hidden_files={"tests/test_hidden.py": _HIDDEN},
    solution_files={"lib/tally.py": "def tally(xs):\n    return sum(xs)\n"},
    test_paths=("tests/test_all.py",),
    hidden_test_paths=("tests/test_hidden.py",),
    metadata={"level": 1, "bug_kind": "operator"},
)

READ = ToolCall("read_file", {"path": "lib/tally.py"})
MEND = ToolCall("edit_lines", {"path": "lib/tally.py", "start": "2", "text": "    return sum(xs)"})
SPOIL = ToolCall("edit_lines", {"path": "lib/tally.py", "start": "2", "text": "    return sum(xs) + 1"})
TEST = ToolCall("run_tests")
FINISH = ToolCall("finish")

SOLVES: tuple[Turn, ...] = ((READ,), (MEND,), (TEST,), (FINISH,))
FAILS: tuple[Turn, ...] = ((READ,), (SPOIL,), (TEST,), (FINISH,))


@cache
def renderer() -> Renderer:
    """One renderer for all tests: its tokenizer knows bytes and tags only."""
    grammar = XmlGrammar(core_registry().schemas)
    controls = [*ETUDE_TEMPLATE.control_tokens, *grammar.control_tokens()]
    return Renderer(train_tokenizer([], 256 + len(controls), controls), grammar)


def script_of(play: Callable[[str], Sequence[Turn]]) -> Callable[[str, Tokens], Tokens]:
    """A policy that plays `play(session id)`: which turn it is at, it reads off its own tokens."""
    opening = renderer().tokenizer.control_id("<|assistant|>")

    def script(session_id: str, context: Tokens) -> Tokens:
        turns = play(session_id)
        return renderer().message(turns[int((context == opening).sum()) - 1])

    return script


def scripted(turns: Sequence[Turn]) -> ScriptedSampler:
    """A sampler that plays the same turns in every session, with made-up expert routes."""
    return ScriptedSampler(script_of(lambda _: turns), route_shape=(2, 2))


def new_environment(
    backend: SandboxBackend | None = None,
    blobs: MemoryBlobs | None = None,
    max_attempts: int = 3,
    session: SessionLimits | None = None,
    reward: RewardConfig | None = None,
) -> Environment:
    """An environment over a backend, in memory unless given."""
    limits = EpisodeLimits(session or SessionLimits(max_tokens=2048), max_attempts=max_attempts)
    keep = (MemoryBlobs() if blobs is None else blobs).put
    return Environment(backend or MemoryBackend(), renderer(), limits, reward or RewardConfig(), keep)


def run_episode(
    environment: Environment,
    sampler: ScriptedSampler,
    task: Task = TASK,
    identity: TrajectoryId | None = None,
) -> Trajectory:
    """One episode in an event loop of its own."""
    name = identity or TrajectoryId("run", task.id, 0, 0, 0)
    return asyncio.run(environment.run(task, name, sampler, (7, 1), SamplingParams()))


def verdicts(trajectories: Sequence[Trajectory]) -> Mapping[str, float | None]:
    """Id -> the task's part of the reward."""
    return {str(t.id): t.reward.task if t.reward else None for t in trajectories}
