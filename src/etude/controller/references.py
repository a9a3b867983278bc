"""Sessions that solve tasks as their reference solutions do: what a model is fine-tuned on before RL.

    solution ──run──> files after it ──> grep, read_file, edit_lines, run_tests, finish
                                               └──played in the task's sandbox, and graded as an agent's

Only sessions that pass are kept; their outputs are those that an agent would have read.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from etude.agent import agent_registry
from etude.config import RunConfig
from etude.controller.backends import open_run_backend
from etude.controller.expert_chats import ScriptedSession, ScriptedTurn
from etude.environment.episodes import EpisodeLimits
from etude.environment.grading import allowed_changes
from etude.environment.origins import task_origin
from etude.environment.running import unwatched
from etude.environment.scripts import run_solution
from etude.environment.sessions import EnvironmentSession, Site
from etude.environment.verdicts import Grader
from etude.errors import AgentError, TaskError
from etude.kit.tasks import end_tasks
from etude.observe import Observer
from etude.records import Task, ToolCall

_AROUND = 8
"""Lines that are read before and after those that are changed."""
_APART = 3
"""Changes of a file with fewer lines between them are one edit."""
_AT_ONCE = 2
_PAGE = 40
"""Lines that are read at once from where a definition was found."""
_MOST_PAGES = 3
_DEFINITION = re.compile(r"\s*(?:async def|def|class) (\w+)")
_CODE = re.compile(r"`[^`]+`")
_NAME = re.compile(r"(?<![\w/])[A-Za-z_]\w+(?![\w/]|\.py\b)")
"""Not a part of a path."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines `start` to `end` of a file, counted from 1 and both included, become `text`."""

    start: int
    end: int
    text: str


class _UnplayableError(Exception):
    """Why a reference solution cannot be played with the tools that are offered."""


async def play_references(
    tasks: Sequence[Task], count: int, config: RunConfig, observer: Observer
) -> list[ScriptedSession]:
    """Sessions on the first tasks that a session can be made of, at most `count`, in the order of `tasks`.

    The observer is given the number of tasks that are left out for each reason. Raises SandboxError,
    ConfigError for tools that there are not.
    """
    backend, limits = open_run_backend(config.sandbox), EpisodeLimits.from_config(config)
    site = Site(backend, Grader(backend, limits.sandbox), agent_registry(config.agent), limits.tools)
    reasons, sessions, places = Counter[str](), list[ScriptedSession](), asyncio.Semaphore(_AT_ONCE)

    async def play(task: Task) -> ScriptedSession | None:
        async with places:
            if len(sessions) >= count:
                return None
            try:
                found = await _play(task, site, limits)
            except (_UnplayableError, TaskError, AgentError) as error:
                reasons[str(error)] += 1
                return None
            sessions.append(found)
            observer.stage_advances(len(sessions), {})
            return found

    observer.stage_begins("reference sessions", min(count, len(tasks)), "session")
    playing = [asyncio.create_task(play(task)) for task in tasks]
    try:
        played = await asyncio.gather(*playing)
    finally:
        await end_tasks(*playing)
        observer.stage_ends()
        await backend.close()
    for reason, number in reasons.most_common():
        observer.say(f"{number} tasks left out: {reason}")
    return [one for one in played if one is not None][:count]


async def _play(task: Task, site: Site, limits: EpisodeLimits) -> ScriptedSession:
    if task.steps:
        raise _UnplayableError("has several steps")
    after = await _solve(task, site, limits)
    world = EnvironmentSession.begin(site, task, limits.sandbox)
    try:
        turns = list[ScriptedTurn]()
        before = await world.sandbox.files.read_many(list(after), limits.tools.file_bytes)
        texts = {path: (_text(old), new) for (path, new), old in zip(after.items(), before, strict=True)}
        for calls in _write_calls(task, texts, frozenset(site.tools), limits):
            results = await world.run_calls(calls, {}, unwatched, unwatched)
            if failed := next((one.output for one in results if one.error is not None), None):
                if calls[0].name == "run_tests":
                    continue  # it shows the agent none
                raise _UnplayableError(f"a tool fails: {failed}")
            outputs = () if world.finished else tuple(one.output for one in results)
            turns.append(ScriptedTurn(tuple(calls), outputs))
        outcome = await world.submit()
        if not outcome.verdict.passed:
            raise _UnplayableError("its session does not pass")
        return ScriptedSession(task.instruction, tuple(turns))
    finally:
        await world.close()


async def _solve(task: Task, site: Site, limits: EpisodeLimits) -> dict[str, str]:
    """The text of each file that the reference solution changes. Raises _UnplayableError."""
    if task.solution is None:
        changes: Mapping[str, bytes | str | None] = task.solution_files
    else:
        async with task_origin(task, limits.sandbox).opened(site.backend) as sandbox:
            if failure := await run_solution(task, sandbox):
                raise _UnplayableError(failure)
            changes = allowed_changes(task, await sandbox.final_diff())
    if not changes:
        raise _UnplayableError("has no reference solution that changes a file")
    texts = {path: data if isinstance(data, str) else _text(data) for path, data in sorted(changes.items())}
    found = {path: text for path, text in texts.items() if text is not None}
    if len(found) < len(texts):
        raise _UnplayableError("its solution deletes files, or writes some that are no text")
    return found


def _text(data: bytes | Exception | None) -> str | None:
    """The text of a file; None for one that is missing, or no text."""
    try:
        return data.decode() if isinstance(data, bytes) else None
    except UnicodeDecodeError:
        return None


def _write_calls(
    task: Task, texts: Mapping[str, tuple[str | None, str]], tools: frozenset[str], limits: EpisodeLimits
) -> Iterator[list[ToolCall]]:
    """The calls of each turn: one file after the other is found, read and edited. `texts`: path -> before
    (None: it is new) and after. Raises _UnplayableError for tools that are missing."""
    for path, (before, after) in texts.items():
        if before is None:
            _need("write_file", tools)
            yield [ToolCall("write_file", {"path": path, "text": after})]
            continue
        hunks = find_hunks(before, after)
        can_find = bool(hunks) and "grep" in tools
        found = find_definition(task.instruction, before, hunks[0].start) if can_find else None
        if found is not None:
            yield [ToolCall("grep", {"pattern": rf"(def|class) {found[0]}\b"})]
        yield from _edit_calls(path, hunks, found[1] if found else 0, tools, limits)
    if "run_tests" in tools:
        yield [ToolCall("run_tests")]
    _need("finish", tools)
    yield [ToolCall("finish")]


def _edit_calls(
    path: str, hunks: Sequence[Hunk], definition: int, tools: frozenset[str], limits: EpisodeLimits
) -> Iterator[list[ToolCall]]:
    """Reads what is to be changed, from above, and then changes it, from below, so that numbers stay.
    `definition`: the line of it that was found, or 0."""
    if "read_file" in tools:
        for first, count in find_pages(hunks, definition):
            lines = {"offset": str(first), "limit": str(min(count, limits.tools.read_lines))}
            yield [ToolCall("read_file", {"path": path, **lines})]
    _need("edit_lines", tools)
    for hunk in reversed(hunks):
        lines = {"start": str(hunk.start), "end": str(hunk.end)}
        yield [ToolCall("edit_lines", {"path": path, **lines, "text": hunk.text})]


def find_hunks(before: str, after: str) -> list[Hunk]:
    """What of a file's lines is to be replaced, from above. The text of an edit is never one blank line, by
    which `edit_lines` would delete, nor are lines only added: a line beside is written again."""
    old, new = before.removesuffix("\n").split("\n"), after.removesuffix("\n").split("\n")
    ranges = list[list[int]]()
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if ranges and i1 - ranges[-1][1] < _APART:
            ranges[-1][1], ranges[-1][3] = i2, j2
        else:
            ranges.append([i1, i2, j1, j2])
    for found in ranges:
        i1, i2, j1, j2 = found
        if i1 == i2 or new[j1:j2] == [""]:
            found[:] = [i1 - 1, i2, j1 - 1, j2] if i1 else [i1, i2 + 1, j1, j2 + 1]
    return [Hunk(i1 + 1, min(i2, len(old)), "\n".join(new[j1:j2])) for i1, i2, j1, j2 in ranges]


def find_pages(hunks: Sequence[Hunk], definition: int) -> list[tuple[int, int]]:
    """(first line, number of lines) of what is read before hunks are edited, once each: page after page from
    a definition that was found down to them, which an agent can repeat, else the lines around each."""
    pages = dict[int, int]()
    for hunk in hunks:
        if definition and definition <= hunk.start and hunk.end < definition + _MOST_PAGES * _PAGE:
            pages |= dict.fromkeys(range(definition, hunk.end + 1, _PAGE), _PAGE)
        else:
            first = max(1, hunk.start - _AROUND)
            pages[first] = hunk.end + _AROUND - first + 1
    return sorted(pages.items())


def find_definition(instruction: str, text: str, line: int) -> tuple[str, int] | None:
    """(name, line) of what a file defines and an instruction names, in code if any is: the last at or above a
    line, which is most likely around it, else the first."""
    words = _CODE.findall(instruction) or [instruction]
    named = {name for part in words for name in _NAME.findall(part)}
    found = [
        (match[1], at)
        for at, row in enumerate(text.split("\n"), start=1)
        if (match := _DEFINITION.match(row)) and match[1] in named
    ]
    above = [one for one in found if one[1] <= line]
    return above[-1] if above else (found[0] if found else None)


def _need(tool: str, tools: frozenset[str]) -> None:
    if tool not in tools:
        raise _UnplayableError(f"needs the tool {tool}")
