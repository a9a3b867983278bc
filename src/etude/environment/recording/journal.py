"""The journal of a live session: one line for each input of its session map, in order.

    session   owner and specification of the session
    begin     a request's history: the length of its common prefix with an earlier one, and the new messages
    commit    an answer, as it was sampled and served
    fail      an answer that was discarded
    reward    the reward that the trainer set

The map is a function of these lines (it has no I/O and no clock), so a restarted server recovers its live
sessions token for token. A commit is synced before the client is sent the end of the answer; an answer that
was interrupted counts as failed, and its client sends the request again. One process at a time has the file
open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from xxhash import xxh3_64_hexdigest

from etude.agent.inputs import ChunksIn, from_document, merge, to_document
from etude.environment.recording.session_map import Generation, MapLimits, SessionMap
from etude.environment.recording.spec import SessionSpec
from etude.errors import ConfigError, EtudeError, StoreError
from etude.kit.journal import LineJournal
from etude.records import RewardBreakdown, SampleChunk, SamplingParams
from etude.tokens.chat.messages import Answer, Message, Opening, Results, SystemWords, UserWords
from etude.tokens.chat.renderer_cache import RendererCache

_MESSAGES: Mapping[str, TypeAdapter[Message]] = {
    kind.__name__: TypeAdapter(kind) for kind in (Opening, SystemWords, UserWords, Results, Answer)
}
FORMAT = 2
LIVE = "live"
"""Directory of the journals, within the store's."""
_KEPT_HISTORIES = 8
"""Number of earlier histories with which a new one is compared: alternating agents have one each."""


class SessionJournal:
    """Writes one session's lines. Lines are not synced until `sync` is called.

    After a line could not be written the journal is unusable, and every later `begin` raises.
    """

    def __init__(self, file: LineJournal, num_begun: int = 0) -> None:
        """Use `create` or `read_journal`."""
        self.path = file.path
        self._file = file
        self._num_begun = num_begun
        self._histories: deque[tuple[int, tuple[Message, ...]]] = deque(maxlen=_KEPT_HISTORIES)

    @classmethod
    def create(cls, path: Path, described: Mapping[str, Any]) -> SessionJournal:
        """Creates the journal of a new session. Raises StoreError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            journal = cls(LineJournal.create(path, xxh3_64_hexdigest))
        except OSError as error:
            raise _cannot_open(error) from error
        try:
            journal._file.append({"kind": "session", "format": FORMAT, **described})
        except StoreError:
            journal.remove()
            raise
        return journal

    def begin(self, messages: Sequence[Message], params: SamplingParams) -> int:
        """Records a request that the map has accepted; returns its number. Raises StoreError."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        whole = tuple(messages)
        base, kept, known = self._nearest(whole)
        self._histories.append((number, known[:kept] + whole[kept:]))  # equal messages share memory
        self._file.append(
            {
                "kind": "begin",
                "number": number,
                "base": base,
                "kept": kept,
                "messages": [message_document(message) for message in whole[kept:]],
                "params": asdict(params),
            }
        )
        return number

    def commit(
        self,
        number: int,
        chunks: Sequence[SampleChunk],
        answer: Answer,
        known_tokens: int,
        malformed_calls: int,
        aborted: bool,
    ) -> None:
        """Records the answer to request `number`. `known_tokens`: `Branch.known` before it."""
        self._file.append(
            {
                "kind": "commit",
                "number": number,
                "chunks": to_document(ChunksIn(merge(chunks)))["chunks"],
                "answer": message_document(answer),
                "known_tokens": known_tokens,
                "malformed_calls": malformed_calls,
                "aborted": aborted,
            }
        )

    def fail(self, number: int, aborted: bool) -> None:
        """Records that the answer to request `number` was discarded. The next `begin` raises errors."""
        with contextlib.suppress(StoreError):
            self._file.append({"kind": "fail", "number": number, "aborted": aborted})

    def reward(self, reward: RewardBreakdown) -> None:
        """Records the reward. Raises StoreError."""
        self._file.append({"kind": "reward", "reward": asdict(reward)})

    async def sync(self) -> None:
        """Makes all lines durable. Raises StoreError."""
        await asyncio.to_thread(self._file.sync)

    def close(self) -> None:
        """Closes the file; the session can be recovered from it. Idempotent."""
        self._file.close()

    def remove(self) -> None:
        """Removes the file when the session has ended. Idempotent."""
        self._file.remove()

    def _nearest(self, whole: tuple[Message, ...]) -> tuple[int, int, tuple[Message, ...]]:
        """(number, length of the common prefix, history) of the earlier request with the longest one."""
        best: tuple[int, int, tuple[Message, ...]] = (0, 0, ())
        for number, history in reversed(self._histories):
            count = 0
            for known, message in zip(history, whole, strict=False):
                if known != message:
                    break
                count += 1
            if count > best[1]:
                best = (number, count, history)
            if count and count == len(history):
                break  # it continues this one
        return best


def read_journal(path: Path) -> tuple[SessionJournal, list[dict[str, Any]]] | None:
    """Opens a journal to continue it; returns it with its lines. None if another process has it open, or has
    just ended its session.

    Raises StoreError if it is damaged.
    """
    try:
        file, lines = LineJournal.resume(path, xxh3_64_hexdigest)
    except (BlockingIOError, FileNotFoundError):
        return None
    except OSError as error:
        raise _cannot_open(error) from error
    if lines and (lines[0].get("kind") != "session" or lines[0].get("format") != FORMAT):
        file.close()
        raise StoreError("is not a journal of Étude", field="store", received=str(path), fix="move it away")
    begun = sum(line["kind"] == "begin" for line in lines)
    return SessionJournal(file, begun), lines


def replay(lines: Sequence[Mapping[str, Any]], session_map: SessionMap) -> RewardBreakdown | None:
    """Applies the lines (without the first) to a new map; returns the last reward.

    Interrupted answers count as failed. Raises StoreError for inconsistent lines.
    """
    begun: dict[int, Generation] = {}
    histories: dict[int, tuple[Message, ...]] = {}
    reward: RewardBreakdown | None = None
    try:
        for line in lines:
            match line["kind"]:
                case "begin":
                    number = line["number"]
                    new = tuple(message_of(document) for document in line["messages"])
                    kept = histories[line["base"]][: line["kept"]] if line["kept"] else ()
                    histories[number] = kept + new
                    params = SamplingParams(**line["params"])
                    begun[number] = session_map.begin(histories[number], params)
                case "commit":
                    _commit(session_map, begun.pop(line["number"]), line)
                case "fail":
                    session_map.fail(begun.pop(line["number"]), line.get("aborted", False))
                case "reward":
                    reward = RewardBreakdown(**line["reward"])
                case kind:
                    raise ValueError(f"unknown kind {kind!r}")
        for generation in begun.values():
            session_map.fail(generation)
    except (EtudeError, KeyError, ValueError, TypeError, AssertionError) as error:
        raise _inconsistent(repr(error)) from error
    for branch in session_map.branches:
        # The new sampler has no keys and values.
        branch.known, branch.prefix_digest = 0, None
    return reward


def _commit(session_map: SessionMap, generation: Generation, line: Mapping[str, Any]) -> None:
    chunks = from_document({"kind": "chunks", "chunks": line["chunks"]})
    answer = message_of(line["answer"])
    assert isinstance(chunks, ChunksIn) and isinstance(answer, Answer)
    generation.branch.known = line["known_tokens"]
    session_map.commit(generation, chunks.chunks, answer)
    session_map.counts.malformed_calls += line["malformed_calls"]
    session_map.counts.aborted += line["aborted"]


def _inconsistent(received: str) -> StoreError:
    return StoreError("the journal is inconsistent", field="session", received=received, fix="move it away")


def _cannot_open(error: OSError) -> StoreError:
    return StoreError(
        "the session's journal cannot be opened",
        field="store",
        received=str(error),
        fix="make the store writable again",
    )


def message_document(message: Message) -> dict[str, Any]:
    """Encodes a message as plain JSON values."""
    return {"kind": type(message).__name__, **asdict(message)}


def message_of(document: Mapping[str, Any]) -> Message:
    """Inverse of `message_document`. Raises KeyError or ValueError for other documents."""
    return _MESSAGES[document["kind"]].validate_python(document)


# ---- recovery after a restart -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Everything about a session before its first request: the first line of its journal."""

    id: str
    key: str
    tenant: str
    spec: SessionSpec
    limits: MapLimits
    renderers: str
    """Digest of tokenizer, grammar and template."""
    created_unix_s: float


_FACTS = TypeAdapter(SessionFacts)


FoundSession = tuple[SessionFacts, SessionJournal, SessionMap, RewardBreakdown | None]
"""A session recovered from its journal."""


def find_sessions(folder: Path, renderers: RendererCache) -> Iterator[FoundSession]:
    """Recovers the sessions of the journals in a folder that no other process has open, oldest first.

    A journal without a complete line belongs to a session that no client knows: it is removed. Raises
    StoreError for a damaged one, and ConfigError for one of a model with another tokenizer, grammar or
    template.
    """
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (_written_s(path), path.name)):
        taken = read_journal(path)
        if taken is None:
            continue
        journal, lines = taken
        if not lines:
            journal.remove()
            continue
        try:
            yield _found(journal, lines, renderers)
        except BaseException:
            journal.close()
            raise


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just ended its session
        return 0.0


def _found(journal: SessionJournal, lines: list[dict[str, Any]], renderers: RendererCache) -> FoundSession:
    try:
        facts = _FACTS.validate_python(lines[0])
    except ValueError as error:
        raise _inconsistent(f"{journal.path}: {error!r}") from error
    if facts.renderers != renderers.digest:
        raise ConfigError(
            "a live session was recorded with another tokenizer, grammar or template",
            field="store",
            received=str(journal.path),
            fix="serve the model that it began with, or move the file away",
        )
    name, spec = str(facts.spec.trajectory_id), facts.spec
    session_map = SessionMap(name, renderers.find, facts.limits, spec.keep_thinking)
    return facts, journal, session_map, replay(lines[1:], session_map)
