"""Makes sessions that solve tasks as their reference solutions do, to fine-tune a model on before RL.

    solution ──run──> files after it ──> grep, read_file, edit_lines, run_tests, finish
                                               └──played in the task's sandbox, and graded as an agent's

Only sessions that pass are returned; their tool outputs are those that an agent would have read.
"""

from __future__ import annotations

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
from etude.environment.running import ignore_event
from etude.environment.scripts import run_solution
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.errors import AgentError, TaskError
from etude.kit.syntax import read_text
from etude.kit.tasks import gather_bounded
from etude.observe import Observer
from etude.records import Task, ToolCall

_AROUND = 8
"""Lines read before and after the changed ones."""
_APART = 3
"""Changes with fewer lines between them are merged into one edit."""
_AT_ONCE = 2
_PAGE = 40
"""Lines per read, starting at a definition."""
_MOST_PAGES = 3
_DEFINITION = re.compile(r"\s*(?:async def|def|class) (\w+)")
_CODE = re.compile(r"`[^`]+`")
_DOTTED = re.compile(r"(?<![\w/])[A-Za-z_]\w+(?:\.[A-Za-z_]\w+)*(?![\w/]|\.py\b)")
"""A name, not a part of a path."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """An edit that replaces lines `start` to `end` of a file, counted from 1, both included, by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class FileRead:
    """A grep for a definition, and reads of the file from there on."""

    names: tuple[str, ...]
    """Name of the definition, preceded by that of its class, if known; empty: there is no grep."""
    pages: tuple[tuple[int, int], ...]
    """First line and number of lines of each read."""


class _UnplayableError(Exception):
    """A reference solution cannot be played with the agent's tools; its message is the reason."""


async def play_references(
    tasks: Sequence[Task], count: int, config: RunConfig, observer: Observer
) -> list[ScriptedSession]:
    """Plays the reference solutions of the first tasks that allow it; at most `count`, in order of `tasks`.

    Reports to the observer how many tasks were left out for each reason. Raises SandboxError, ConfigError for
    unknown tools.
    """
    backend, limits = open_run_backend(config.sandbox), EpisodeLimits.from_config(config)
    services = SessionServices(
        backend, Grader(backend, limits.sandbox), agent_registry(config.agent), limits.tools
    )
    reasons, sessions = Counter[str](), list[ScriptedSession]()

    async def play(task: Task) -> ScriptedSession | None:
        if len(sessions) >= count:
            return None
        try:
            found = await _play(task, services, limits)
        except (_UnplayableError, TaskError, AgentError) as error:
            reasons[str(error)] += 1
            return None
        sessions.append(found)
        observer.stage_advances(len(sessions), {})
        return found

    observer.stage_begins("reference sessions", min(count, len(tasks)), "session")
    try:
        played = await gather_bounded(play, tasks, _AT_ONCE)
    finally:
        observer.stage_ends()
        await backend.close()
    for reason, number in reasons.most_common():
        observer.say(f"{number} task{'s' * (number != 1)} left out: {reason}")
    return [session for session in played if session is not None][:count]


async def _play(task: Task, services: SessionServices, limits: EpisodeLimits) -> ScriptedSession:
    if task.steps:
        raise _UnplayableError("has several steps")
    after = await _solve(task, services, limits)
    env_session = EnvironmentSession.begin(services, task, limits.sandbox)
    try:
        turns = list[ScriptedTurn]()
        before = await env_session.sandbox.files.read_many(list(after), limits.tools.file_bytes)
        texts = {path: (read_text(old), new) for (path, new), old in zip(after.items(), before, strict=True)}
        for calls in _write_calls(task, texts, frozenset(services.tools), limits):
            results = await env_session.run_calls(calls, {}, ignore_event, ignore_event)
            if failed := next((result.output for result in results if result.error is not None), None):
                if calls[0].name == "run_tests":
                    continue  # the task shows the agent no tests
                raise _UnplayableError(f"a tool fails: {failed}")
            outputs = () if env_session.finished else tuple(result.output for result in results)
            turns.append(ScriptedTurn(tuple(calls), outputs))
        outcome = await env_session.submit()
        if not outcome.verdict.passed:
            raise _UnplayableError("its session does not pass")
        return ScriptedSession(task.instruction, tuple(turns))
    finally:
        await env_session.close()


async def _solve(task: Task, services: SessionServices, limits: EpisodeLimits) -> dict[str, str]:
    """The new text of each file that the reference solution changes. Raises _UnplayableError."""
    if task.solution is None:
        changes: Mapping[str, bytes | str | None] = task.solution_files
    else:
        async with await task_origin(task, limits.sandbox).make(services.backend) as sandbox:
            if failure := await run_solution(task, sandbox):
                raise _UnplayableError(failure)
            changes = allowed_changes(task, await sandbox.final_diff())
    if not changes:
        raise _UnplayableError("has no reference solution that changes a file")
    texts = {
        path: data if isinstance(data, str) else read_text(data) for path, data in sorted(changes.items())
    }
    found = {path: text for path, text in texts.items() if text is not None}
    if len(found) < len(texts):
        raise _UnplayableError("its solution deletes files, or writes files that are not text")
    return found


def _write_calls(
    task: Task, texts: Mapping[str, tuple[str | None, str]], tools: frozenset[str], limits: EpisodeLimits
) -> Iterator[list[ToolCall]]:
    """The calls of each turn: finds, reads and edits one file after the other. `texts`: path -> before (None:
    it is new) and after. Raises _UnplayableError for missing tools."""
    for path, (before, after) in texts.items():
        if before is None:
            _need("write_file", tools)
            yield [ToolCall("write_file", {"path": path, "text": after})]
            continue
        hunks = find_hunks(before, after)
        # Without grep the agent cannot find definitions.
        reads = plan_reads(task.instruction, before if "grep" in tools else "", hunks)
        yield from _read_calls(path, reads, path in task.instruction, tools, limits)
        _need("edit_lines", tools)
        for hunk in reversed(hunks):  # from below, so that numbers stay
            lines = {"start": str(hunk.start), "end": str(hunk.end)}
            yield [ToolCall("edit_lines", {"path": path, **lines, "text": hunk.text})]
    if "run_tests" in tools:
        yield [ToolCall("run_tests")]
    _need("finish", tools)
    yield [ToolCall("finish")]


def _read_calls(
    path: str, reads: Sequence[FileRead], is_known: bool, tools: frozenset[str], limits: EpisodeLimits
) -> Iterator[list[ToolCall]]:
    """The calls of these reads. `is_known`: whether the agent knows the file's path before."""
    for read in reads:
        if read.names:
            names = read.names[0] if len(read.names) == 1 else f"({'|'.join(read.names)})"
            within = {"path": path} if is_known else {}
            yield [ToolCall("grep", {"pattern": rf"(def|class) {names}\b", **within})]
            is_known = True
        for first, count in read.pages if "read_file" in tools else ():
            lines = {"offset": str(first), "limit": str(min(count, limits.tools.read_lines))}
            yield [ToolCall("read_file", {"path": path, **lines})]


def find_hunks(before: str, after: str) -> list[Hunk]:
    """The edits of a file, from top to bottom. No edit's text is a single blank line, with which `edit_lines`
    would delete, and none only adds lines: an adjacent line is replaced too."""
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


def plan_reads(instruction: str, text: str, hunks: Sequence[Hunk]) -> list[FileRead]:
    """The reads of an agent before it edits hunks of a file, each from a line that grep has shown: from the
    definition that the instruction names, page after page down to the hunks; then from the definition above
    each hunk not covered by these; without any, the lines around the hunk."""
    known = [
        (match[1], line)
        for line, row in enumerate(text.split("\n"), start=1)
        if (match := _DEFINITION.match(row))
    ]
    reads, remaining = list[FileRead](), list(hunks)
    named = find_named(instruction, known, hunks[0].start) if hunks else None
    while remaining:
        above = [definition for definition in known if _leads_to(definition[1], remaining[0])]
        if named is None and not above:
            hunk = remaining.pop(0)
            first = max(1, hunk.start - _AROUND)
            reads.append(FileRead((), ((first, hunk.end + _AROUND - first + 1),)))
            continue
        names, line = named or ((above[-1][0],), above[-1][1])
        named = None
        last = max((hunk.end for hunk in remaining if _leads_to(line, hunk)), default=line)
        reads.append(FileRead(names, tuple((first, _PAGE) for first in range(line, last + 1, _PAGE))))
        remaining = [hunk for hunk in remaining if not _leads_to(line, hunk)]
    return reads


def _leads_to(definition: int, hunk: Hunk) -> bool:
    """Whether a hunk is on one of the pages that start at a definition's line."""
    return definition <= hunk.start and hunk.end < definition + _MOST_PAGES * _PAGE


def find_named(
    instruction: str, known: Sequence[tuple[str, int]], line: int
) -> tuple[tuple[str, ...], int] | None:
    """The names to grep for, and the line, of a definition that an instruction names, preferably as code: the
    last at or above `line`, which most likely contains it, else the first. `known`: name and line of all
    definitions of a file, in order. Of `Schema.compile` both names are used: one identifies the other."""
    words = _CODE.findall(instruction) or [instruction]
    dotted = [name.split(".") for part in words for name in _DOTTED.findall(part)]
    mentioned = {name for parts in dotted for name in parts}
    found = [definition for definition in known if definition[0] in mentioned]
    if not found:
        return None
    above = [definition for definition in found if definition[1] <= line]
    name, at = above[-1] if above else found[0]
    owners = {parts[place - 1] for parts in dotted for place in range(1, len(parts)) if parts[place] == name}
    owner = next((name for name, _ in known if name in owners), None)
    return ((name,) if owner is None else (owner, name)), at


def _need(tool: str, tools: frozenset[str]) -> None:
    if tool not in tools:
        raise _UnplayableError(f"needs the tool {tool}")
