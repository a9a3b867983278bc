"""A session on disk: a line journal of its description and all of its inputs, in order.

The first line describes the session. Lines are synced before a turn's calls begin and after they have ended,
so that a session can be resumed after a kill -9 and runs nothing twice: calls that may have run and may not
be repeated are answered as interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from etude.agent.inputs import (
    ArchivedIn,
    ChunksIn,
    Input,
    PrefixMissIn,
    ResultsIn,
    StopIn,
    UserIn,
    apply,
    call_document,
    from_document,
    merge,
    result_document,
    result_of,
    to_document,
)
from etude.agent.limits import SessionLimits
from etude.agent.session import AgentSession
from etude.agent.summary import SummaryPolicy
from etude.agent.tools.interface import Tool
from etude.agent.tools.state import ToolState
from etude.errors import ConfigError, StoreError
from etude.kit.journal import LineJournal, read_lines
from etude.protocols import Action, RunCalls
from etude.records import (
    SampleChunk,
    SamplingParams,
    Status,
    ToolCall,
    ToolErrorClass,
    ToolResult,
    TrajectoryId,
)
from etude.tokens.pieces import Control, Piece
from etude.tokens.renderer import Renderer

FORMAT = 1
INTERRUPTED = "error: interrupted; it may have run or not: look before you do it again"


class JournaledSession:
    """Implements `Session` and `CallLog` for an AgentSession that it records on disk.

    One writer at a time: the process that holds the file open for appending has locked it.
    """

    def __init__(self, session: AgentSession, state: ToolState, file: LineJournal) -> None:
        """Use `create` or `resume`."""
        self.session = session
        self.state = state
        self._file = file
        self._chunks: list[SampleChunk] = []
        self._known: dict[int, ToolResult] = {}
        self._closed = False
        self.max_turns: int | None = None
        """Turns after which the session is stopped; recorded in the journal as a stop."""

    @classmethod
    def create(cls, path: Path, session: AgentSession, state: ToolState) -> JournaledSession:
        """Begins the journal of a new session. Raises StoreError if the file exists or cannot be made."""
        assert not session.turns, "the session has begun"
        with _opening(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = LineJournal.create(path, xxh3_64_hexdigest)
        journal = cls(session, state, file)
        journal._file.append({"kind": "session", **describe(session)})
        file.sync()
        return journal

    @classmethod
    def resume(cls, path: Path, renderer: Renderer, tools: Mapping[str, Tool]) -> JournaledSession:
        """Resumes a session where its journal ends. Raises StoreError, ConfigError (another tokenizer)."""
        with _opening(path):
            file, lines = LineJournal.resume(path, xxh3_64_hexdigest)
        try:
            session, state, known = _replayed(_checked(lines, path), renderer, tools, path)
        except BaseException:
            file.close()
            raise
        journal = cls(session, state, file)
        journal._known = known
        journal.on_prefix_miss()
        return journal

    def next_action(self) -> Action:
        return self.session.next_action()

    def on_prefix_miss(self) -> None:
        self._apply_and_record(PrefixMissIn())

    def on_chunk(self, chunk: SampleChunk) -> None:
        """See Session. Chunks are written when their request ends: what a crash cuts off is sampled again."""
        if self.session.status is not None:
            return
        self.session.on_chunk(chunk)
        self._chunks.append(chunk)
        if chunk.finish is not None:
            self._write_chunks()

    def on_results(self, results: Sequence[ToolResult]) -> None:
        self._known.clear()
        self._apply_and_record(ResultsIn(tuple(results)), tools=self.state.to_dict())
        if self.max_turns is not None and len(self.session.turns) >= self.max_turns:
            self.stop(Status.LIMIT, "turns")
        self._file.sync()

    def on_archived(self, error: str = "") -> None:
        self._apply_and_record(ArchivedIn(error))

    def on_user(self, text: str, by_person: bool = True) -> None:
        assert by_person, "a journal is of a person's session"
        self._apply_and_record(UserIn(text))
        self._file.sync()

    def stop(self, status: Status, cause: str) -> None:
        self._apply_and_record(StopIn(status, cause))
        self._file.sync()

    def record_calls(self, calls: tuple[ToolCall, ...]) -> Mapping[int, ToolResult]:
        self._file.append({"kind": "begun", "calls": [call_document(call) for call in calls]})
        self._file.sync()
        return dict(self._known)

    def record_result(self, position: int, result: ToolResult) -> None:
        self._file.append({"kind": "ended", "position": position, "result": result_document(result)})

    def close(self) -> None:
        """Releases the file. Idempotent."""
        if not self._closed:
            self._closed = True
            self._write_chunks()
            self._file.sync()
            self._file.close()

    def _apply_and_record(self, given: Input, **more: Any) -> None:
        self._write_chunks()
        apply(self.session, given)
        self._file.append({**to_document(given), **more})

    def _write_chunks(self) -> None:
        chunks, self._chunks = self._chunks, []
        if chunks:
            self._file.append(to_document(ChunksIn(merge(chunks))))


def describe(session: AgentSession) -> dict[str, Any]:
    """The initial parameters of a session, as plain JSON values."""
    return {
        "format": FORMAT,
        "tokenizer_digest": session.renderer.tokenizer.digest,
        "template_digest": session.renderer.template_digest,
        "instruction": session.instruction,
        "system": _system_document(session.system),
        "trajectory_id": asdict(session.trajectory_id),
        "limits": asdict(session.limits),
        "params": asdict(session.params),
        "summary": None if session.summary is None else asdict(session.summary),
    }


def session_from_description(document: Mapping[str, Any], renderer: Renderer) -> AgentSession:
    """Inverse of `describe`: a session before its first turn.

    Raises ConfigError if `renderer` has another tokenizer, grammar or template: tokens would change meaning.
    """
    digests = {"tokenizer_digest": renderer.tokenizer.digest, "template_digest": renderer.template_digest}
    for name, digest in digests.items():
        if document[name] != digest:
            raise ConfigError(
                f"the session was recorded with a different one ({document[name][:12]})",
                field=name,
                received=digest[:12],
                fix="resume it with the tokenizer and tools that it began with",
            )
    summary = document["summary"]
    return AgentSession(
        instruction=document["instruction"],
        renderer=renderer,
        trajectory_id=TrajectoryId(**document["trajectory_id"]),
        limits=SessionLimits(**document["limits"]),
        params=SamplingParams(**document["params"]),
        system=_system_of(document["system"]),
        summary=None if summary is None else SummaryPolicy(**summary),
    )


def _system_document(system: str | tuple[Piece, ...] | None) -> Any:
    if system is None or isinstance(system, str):
        return system
    return [piece if isinstance(piece, str) else {"control": piece.name} for piece in system]


def _system_of(document: Any) -> str | tuple[Piece, ...] | None:
    if document is None or isinstance(document, str):
        return document
    return tuple(piece if isinstance(piece, str) else Control(piece["control"]) for piece in document)


def replay(path: Path, renderer: Renderer, turns: int | None = None) -> tuple[AgentSession, ToolState]:
    """The session of a journal as it was after `turns` turns (None: at the end), and its tools' memory.

    Reads only. Raises StoreError, ConfigError.
    """
    try:
        lines, _ = read_lines(path, xxh3_64_hexdigest)
    except OSError as error:
        raise StoreError("the journal cannot be read", field="path", received=str(path)) from error
    session, state, _ = _replayed(_until(_checked(lines, path), turns), renderer, {}, path)
    return session, state


def _checked(lines: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    if not lines or lines[0].get("kind") != "session" or lines[0].get("format") != FORMAT:
        raise StoreError("is not the journal of a session", field="path", received=str(path))
    return lines


def _until(lines: Sequence[dict[str, Any]], turns: int | None) -> Iterator[dict[str, Any]]:
    seen = 0
    for number, line in enumerate(lines):
        if number and seen == turns:
            return
        yield line
        seen += line["kind"] == "results"


def _replayed(
    lines: Iterator[dict[str, Any]] | Sequence[dict[str, Any]],
    renderer: Renderer,
    tools: Mapping[str, Tool],
    path: Path,
) -> tuple[AgentSession, ToolState, dict[int, ToolResult]]:
    """Session, tools' memory, and the recorded calls of a turn that did not end."""
    rest = iter(lines)
    session = session_from_description(next(rest), renderer)
    state = ToolState()
    begun = False
    known: dict[int, ToolResult] = {}
    try:
        for line in rest:
            match line["kind"]:
                case "begun":
                    begun = True
                case "ended":
                    known[line["position"]] = result_of(line["result"])
                case kind:
                    apply(session, from_document(line))
                    begun = begun and kind == "prefix_miss"
                    known = known if begun else {}
                    state = ToolState.from_dict(line["tools"]) if kind == "results" else state
    except (KeyError, ValueError, TypeError, AssertionError) as error:
        raise StoreError("the journal is inconsistent", field=str(path), received=repr(error)) from error
    action = session.next_action()
    if begun and isinstance(action, RunCalls):
        known |= _interrupted(action.calls, known, tools)
    return session, state, known


def _interrupted(
    calls: Sequence[ToolCall], known: Mapping[int, ToolResult], tools: Mapping[str, Tool]
) -> dict[int, ToolResult]:
    """Results for calls that may have run, completely or in part, and may not be repeated."""
    once = {name for name, tool in tools.items() if not tool.repeatable}
    return {
        position: ToolResult(INTERRUPTED, ToolErrorClass.PROVIDER)
        for position, call in enumerate(calls)
        if position not in known and call.error is None and call.name in once
    }


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise StoreError("the session is in use", field="path", received=str(path)) from error
    except OSError as error:
        raise StoreError("the journal cannot be opened", field="path", received=str(error)) from error
