"""Sessions of scripted authors, played through the real harness, as text for mid-training.

The corpus is stored as messages (calls, outputs), not as tokens: with any tokenizer the renderer turns it
into exactly the tokens of a real session.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import zstandard

from etude.agent import SessionLimits, open_renderer
from etude.agent.index.templates import TemplateIndexes
from etude.agent.prompts import own_control_tokens
from etude.config import AgentConfig, RunConfig
from etude.controller.expert_chats import ScriptedSession, ScriptedTurn
from etude.controller.families import Messages
from etude.environment.episodes import EpisodeLimits
from etude.errors import StoreError
from etude.records import Task, ToolCall
from etude.tokens.renderer import Renderer
from etude.tokens.training import train_tokenizer
from etude_quickstart.composed import ComposedGenerator
from etude_quickstart.expert import Expert
from etude_quickstart.generator import TaskGenerator
from etude_quickstart.observed import ObservedGenerator
from etude_quickstart.observed_expert import ObservedExpert
from etude_quickstart.part_expert import PartExpert
from etude_quickstart.playing import Author, play, play_in_processes

_CHUNK = 250
"""Sessions per work item of a worker process."""
_UNBOUNDED = 1 << 20


Script = Callable[[int, int], tuple[Task, Author]]
"""(seed, number) -> a task of the training split and its author. A module-level function, to be picklable."""


def script_bug_fix(seed: int, number: int) -> tuple[Task, Author]:
    """A bug-fixing task with its expert."""
    task = TaskGenerator(seed, "train").task(number)
    return task, Expert(task, Random(f"{seed}/{number}"))


def script_part(seed: int, number: int) -> tuple[Task, Author]:
    """A part of a composed task, with one bug, and its expert."""
    task = ComposedGenerator(seed, "train").part(number)
    return task, PartExpert(task, Random(f"part/{seed}/{number}"))


def script_observed(seed: int, number: int) -> tuple[Task, Author]:
    """An observed task with its expert."""
    task = ObservedGenerator(seed, "train").task(number)
    return task, ObservedExpert(task, Random(f"observed/{seed}/{number}"))


def generate_corpus(
    num_sessions: int, seed: int, num_workers: int, first: int = 0, script: Script = script_bug_fix
) -> list[ScriptedSession]:
    """Sessions `first` .. `first + num_sessions - 1` of the training split's tasks.

    A function of (seed, number) alone, independent of the number of workers.
    """
    numbers = range(first, first + num_sessions)
    chunks = [numbers[start : start + _CHUNK] for start in range(0, num_sessions, _CHUNK)]
    if num_workers <= 1 or len(chunks) == 1:
        parts = [_play_chunk(script, seed, chunk) for chunk in chunks]
    else:
        parts = play_in_processes(partial(_play_chunk, script, seed), chunks, num_workers)
    return [session for part in parts for session in part]


def save_corpus(sessions: Sequence[ScriptedSession], path: Path) -> None:
    """Writes sessions as compressed JSON lines, with a checksum."""
    save_lines([_to_json(session) for session in sessions], path)


def load_corpus(path: Path, num_sessions: int) -> list[ScriptedSession]:
    """The first `num_sessions` sessions of a file. Raises StoreError if it is damaged or too short."""
    sessions: list[ScriptedSession] = []
    for number, value in enumerate(load_lines(path, num_sessions), 1):
        try:
            sessions.append(_from_json(value))
        except (ValueError, TypeError, IndexError) as error:
            raise _damaged(path, f"line {number}: {error}") from error
    return sessions


def save_lines(values: Sequence[Any], path: Path) -> None:
    """Writes JSON values, one a line, compressed, with a checksum."""
    lines = "\n".join(json.dumps(value, separators=(",", ":")) for value in values)
    path.write_bytes(zstandard.ZstdCompressor(level=19, write_checksum=True).compress(lines.encode()))


def load_lines(path: Path, count: int) -> list[Any]:
    """The first `count` values of a file. Raises StoreError if it is damaged or too short."""
    try:
        lines = zstandard.ZstdDecompressor().decompress(path.read_bytes()).decode().split("\n")
    except (OSError, MemoryError, zstandard.ZstdError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    if len(lines) < count:
        raise StoreError(f"corpus holds {len(lines)} documents", field="midtrain", received=count)
    values: list[Any] = []
    for number, line in enumerate(lines[:count], 1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise _damaged(path, f"line {number}: {error}") from error
    return values


def _damaged(path: Path, reason: str) -> StoreError:
    return StoreError(
        f"corpus cannot be read: {reason}", field="corpus", received=path.name, fix="make it again"
    )


def _play_chunk(script: Script, seed: int, numbers: Sequence[int]) -> list[ScriptedSession]:
    controls = own_control_tokens()
    renderer = open_renderer(train_tokenizer([], 256 + len(controls), controls), AgentConfig())

    async def play_all() -> list[ScriptedSession]:
        return [await play_script(*script(seed, number), renderer) for number in numbers]

    return asyncio.run(play_all())


async def play_script(
    task: Task,
    author: Author,
    renderer: Renderer,
    agent: AgentConfig | None = None,
    indexes: TemplateIndexes | None = None,
) -> ScriptedSession:
    """Plays one session: a scripted author in place of a sampler, the rest as in a rollout. `agent`,
    `indexes`: see `play`."""
    limits = SessionLimits(max_tokens=_UNBOUNDED, max_message_tokens=_UNBOUNDED)
    session, messages = await play(task, author, renderer, limits, agent=agent, indexes=indexes)
    turns = [
        ScriptedTurn(parts, tuple(result.output for result in turn.results))
        for parts, turn in zip(messages, session.turns, strict=True)
    ]
    turns[-1] = ScriptedTurn(turns[-1].parts, ())
    return ScriptedSession(task.instruction, tuple(turns))


def played_messages(task: Task, author: Author, renderer: Renderer, config: RunConfig) -> Messages:
    """Tokens of each message that the author writes in one session on an in-memory sandbox, summaries
    included."""
    limits = EpisodeLimits.from_config(config)
    session, _ = asyncio.run(play(task, author, renderer, limits.session, limits.summary))
    messages: Messages = []
    for segment in session.segments():
        edges = np.flatnonzero(np.diff(segment.sampled, prepend=False, append=False))
        messages += [segment.tokens[start:end] for start, end in edges.reshape(-1, 2)]
    return messages


def _to_json(session: ScriptedSession) -> Any:
    turns = [
        [
            [part if isinstance(part, str) else [part.name, dict(part.arguments)] for part in turn.parts],
            turn.outputs,
        ]
        for turn in session.turns
    ]
    return [session.instruction, turns]


def _from_json(value: Any) -> ScriptedSession:
    instruction, turns = value
    return ScriptedSession(
        instruction,
        tuple(
            ScriptedTurn(
                tuple(part if isinstance(part, str) else ToolCall(part[0], part[1]) for part in parts),
                tuple(outputs),
            )
            for parts, outputs in turns
        ),
    )
