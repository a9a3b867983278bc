"""A live session on disk: what it is, and what its map was told, one line each, in order.

    <xxh3-64 of the text, hex> <space> <JSON> <newline>

    session   who may use it, and what whoever trains said of it
    begin     a request's history: as much of an earlier one's, and what is new
    commit    an answer, as it was sampled and served
    fail      an answer of which nothing is kept
    reward    what whoever trains set

The map is a function of these lines (it has no I/O and no clock), so a server that was killed has its live
sessions again, token for token. A commit is synced before its client is told that the answer is complete;
an answer that was cut off counts as failed, and its client asks again. A line torn at the end is dropped;
damage elsewhere is an error. One process at a time holds the file.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from etude.agent.inputs import ChunksIn, from_document, merge, to_document
from etude.environment.recording.session_map import Generation, SessionMap
from etude.errors import EtudeError, StoreError
from etude.records import RewardBreakdown, SampleChunk, SamplingParams
from etude.tokens.chat.client_tools import client_tool
from etude.tokens.chat.messages import (
    Answer,
    Call,
    Message,
    Opening,
    Results,
    SystemWords,
    UserWords,
)

FORMAT = 1
_KEPT_HISTORIES = 8
"""Earlier histories with which a new one is compared: agents that take turns have one each."""


class SessionJournal:
    """Writes one session's lines. Not synced by itself: see `sync`.

    Once a line could not be written the journal is of no use, and every `begin` after it raises.
    """

    def __init__(self, path: Path, file: BinaryIO, num_begun: int = 0) -> None:
        """Use `create` or `resume`."""
        self.path = path
        self._file = file
        self._failed: StoreError | None = None
        self._num_begun = num_begun
        self._histories: deque[tuple[int, tuple[Message, ...]]] = deque(maxlen=_KEPT_HISTORIES)

    @classmethod
    def create(cls, path: Path, described: Mapping[str, Any]) -> SessionJournal:
        """Begins the journal of a new session. Raises StoreError."""
        journal = cls(path, _open(path, os.O_CREAT | os.O_EXCL))
        try:
            journal._append({"kind": "session", "format": FORMAT, **described})
        except StoreError:
            journal.remove()
            raise
        return journal

    def begin(self, messages: Sequence[Message], params: SamplingParams) -> int:
        """A request has found its place in the map; its number. Raises StoreError."""
        number, self._num_begun = self._num_begun, self._num_begun + 1
        told = tuple(messages)
        base, kept, known = self._nearest(told)
        self._histories.append((number, known[:kept] + told[kept:]))  # what is known is held once
        self._append(
            {
                "kind": "begin",
                "number": number,
                "base": base,
                "kept": kept,
                "messages": [message_document(message) for message in told[kept:]],
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
        """The answer to request `number`. `known_tokens`: those of its branch that the sampler held."""
        self._append(
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

    def fail(self, number: int) -> None:
        """Nothing is kept of the answer to request `number`. Raises nothing: the next `begin` does."""
        if self._failed is None:
            try:
                self._append({"kind": "fail", "number": number})
            except StoreError as error:
                self._failed = error

    def reward(self, reward: RewardBreakdown) -> None:
        """The reward was set. Raises StoreError."""
        self._append({"kind": "reward", "reward": asdict(reward)})

    async def sync(self) -> None:
        """What was written is on the disk. Raises StoreError."""
        if self._failed is not None:
            raise self._failed
        try:
            await asyncio.to_thread(os.fdatasync, self._file.fileno())
        except (OSError, ValueError) as error:  # a ValueError: the session has ended, and its file is closed
            raise self._broken(error) from error

    def close(self) -> None:
        """Lets the file go; the session can be taken up again. Idempotent."""
        self._file.close()

    def remove(self) -> None:
        """The session has ended: nothing of it is needed any more. Idempotent."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _nearest(self, told: tuple[Message, ...]) -> tuple[int, int, tuple[Message, ...]]:
        """The earlier request whose history has most in common with this one: number, messages, history."""
        best: tuple[int, int, tuple[Message, ...]] = (0, 0, ())
        for number, history in reversed(self._histories):
            count = 0
            for known, message in zip(history, told, strict=False):
                if known != message:
                    break
                count += 1
            if count > best[1]:
                best = (number, count, history)
            if count and count == len(history):
                break  # the one that it goes on from
        return best

    def _append(self, document: Mapping[str, Any]) -> None:
        if self._failed is not None:
            raise self._failed
        text = json.dumps(document, separators=(",", ":")).encode()
        line = b"%s %s\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)
        try:
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")
        except (OSError, ValueError) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> StoreError:
        self._failed = StoreError(
            "the session's journal cannot be written",
            field="session",
            received=str(error),
            fix="finish the session: what was sampled is still held",
        )
        return self._failed


def read_journal(path: Path) -> tuple[SessionJournal, list[dict[str, Any]]] | None:
    """Takes a journal up, to go on with; and its lines. None where another process holds it, or has just
    ended its session.

    Raises StoreError for one that is damaged.
    """
    try:
        file = _open(path, 0)
    except (BlockingIOError, FileNotFoundError):
        return None
    if not os.fstat(file.fileno()).st_nlink:
        file.close()
        return None
    try:
        lines, length = _lines(path)
        file.truncate(length)
    except BaseException:
        file.close()
        raise
    begun = sum(line["kind"] == "begin" for line in lines)
    return SessionJournal(path, file, begun), lines


def replay(lines: Sequence[Mapping[str, Any]], session_map: SessionMap) -> RewardBreakdown | None:
    """Tells a new map what the lines (without the first) say; the reward that was set last.

    Answers that were cut off have failed. Raises StoreError for lines that make no sense.
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
                    session_map.fail(begun.pop(line["number"]))
                case "reward":
                    reward = RewardBreakdown(**line["reward"])
                case kind:
                    raise ValueError(f"unknown kind {kind!r}")
        for generation in begun.values():
            session_map.fail(generation)
    except (EtudeError, KeyError, ValueError, TypeError, AssertionError) as error:
        raise StoreError(
            "the journal makes no sense", field="session", received=repr(error), fix="move it out of the way"
        ) from error
    for branch in session_map.branches:
        # The sampler is another one.
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


def _open(path: Path, flags: int) -> BinaryIO:
    """Opens for appending, locked, without a buffer. Raises StoreError, BlockingIOError if it is in use, and
    FileNotFoundError if it is not there and shall not be made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
        file = os.fdopen(descriptor, "ab", buffering=0)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not flags & os.O_CREAT:
            raise
        raise StoreError(
            "the session's journal cannot be opened",
            field="store",
            received=str(error),
            fix="make the store writable again",
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file  # pyright: ignore[reportReturnType] - a raw file has all that is used


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All lines, and the length in bytes of what is whole. Raises StoreError."""
    data = path.read_bytes()
    documents: list[dict[str, Any]] = []
    position = 0
    for line in _cut(data):
        digest, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or digest != xxhash.xxh3_64_hexdigest(text).encode():
            if position + len(line) < len(data):
                raise StoreError(
                    "the journal is damaged",
                    field=f"line {len(documents) + 1}",
                    received=str(path),
                    fix="move it out of the way",
                )
            break
        documents.append(json.loads(text))
        position += len(line)
    if documents and (documents[0].get("kind") != "session" or documents[0].get("format") != FORMAT):
        raise StoreError("is no journal of ours", field="store", received=str(path), fix="move it away")
    return documents, position


def _cut(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        end = data.find(b"\n", position) + 1 or len(data)
        yield data[position:end]
        position = end


def message_document(message: Message) -> dict[str, Any]:
    """The message as plain JSON values."""
    match message:
        case Opening(system, tools, agent):
            raw = [dict(tool.raw["function"]) for tool in tools]
            return {"kind": "opening", "system": system, "tools": raw, "agent": agent}
        case SystemWords(text):
            return {"kind": "system", "text": text}
        case UserWords(text):
            return {"kind": "user", "text": text}
        case Results(outputs):
            return {"kind": "results", "outputs": list(outputs)}
        case Answer(text, calls, reasoning):
            rows = [[call.id, call.name, call.arguments] for call in calls]
            return {"kind": "answer", "text": text, "calls": rows, "reasoning": reasoning}


def message_of(document: Mapping[str, Any]) -> Message:
    """What `message_document` gave. Raises KeyError, ValueError or TypeError for anything else."""
    match document["kind"]:
        case "opening":
            tools = tuple(
                client_tool(row["name"], row["description"], row["parameters"], "tools")
                for row in document["tools"]
            )
            return Opening(document["system"], tools, document["agent"])
        case "system":
            return SystemWords(document["text"])
        case "user":
            return UserWords(document["text"])
        case "results":
            return Results(tuple(document["outputs"]))
        case "answer":
            calls = tuple(Call(*row) for row in document["calls"])
            return Answer(document["text"], calls, document["reasoning"])
        case kind:
            raise ValueError(f"unknown kind {kind!r}")
