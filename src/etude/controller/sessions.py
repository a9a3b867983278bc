"""Sessions of agents as documents to fine-tune on: tokens that the agent wrote are weighted, others are
context.

Recorded token ids are used unchanged. Where only messages were recorded, the renderer makes the tokens, as it
would for a rollout.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.config import SessionsConfig
from etude.errors import ConfigError, StoreError
from etude.records import Status, Trajectory
from etude.store import TrajectoryLog, parse_atif
from etude.store.trajectories import find_log
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.framing import Framing
from etude.tokens.chat.messages import Answer, Message, Opening
from etude.tokens.chat.openai_chat import read_messages, read_tools
from etude.tokens.chat.renderer_cache import RendererCache
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document

_HASHES = 1 << 32
_TOO_LONG = "longer than the window"
_SOURCES = "name a run, ATIF files or a JSONL file (.jsonl) of chats"


def find_sessions(name: str, config: SessionsConfig) -> Path:
    """The file or directory of a source. Raises ConfigError if there is none."""
    if not Path(config.path).exists():
        raise ConfigError(
            "no such file or directory",
            field=f"source {name}",
            received=config.path,
            fix=_SOURCES,
        )
    return Path(config.path)


@dataclass(frozen=True, slots=True)
class SessionReader:
    """Reads one source of sessions."""

    name: str
    config: SessionsConfig
    tokenizer: Tokenizer
    open_renderers: Callable[[], RendererCache]
    """Called only where messages are to be rendered."""
    observation_weight: float
    window: int
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Number of skipped sessions, or segments of them, by reason."""

    def load(self) -> list[Document]:
        """Loads every session of the source. Raises ConfigError for a source that does not exist, has no
        usable sessions, or has tokens of another tokenizer; StoreError for a damaged log."""
        documents: list[Document] = []
        for document in self._documents(find_sessions(self.name, self.config)):
            if len(document.tokens) > self.window:
                self.skipped[_TOO_LONG] += 1
            elif not document.weights[1:].any():
                self.skipped["nothing that an agent wrote"] += 1
            else:
                documents.append(document)
        if not documents:
            longer = f"use a model with a longer window than {self.window} tokens, or shorter sessions"
            raise ConfigError(
                "has no sessions to train on",
                field=f"source {self.name}",
                received=dict(self.skipped) or self.config.path,
                fix=longer if _TOO_LONG in self.skipped else _SOURCES,
            )
        return documents

    def _documents(self, path: Path) -> Iterator[Document]:
        if (log := find_log(path)) is not None:
            for group in TrajectoryLog(log).read():
                for trajectory in filter(self._is_wanted, group.members):
                    yield from self._recorded(trajectory)
        elif path.name.endswith(".jsonl"):
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                yield from self._chat(f"{path}, line {number}", line)
        else:
            for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
                yield from self._atif(file)

    def _atif(self, file: Path) -> list[Document]:
        try:
            data = file.read_bytes()
            trajectory = parse_atif(data, str(file))
            if not self._is_wanted(trajectory):
                return []
            recorded = self._recorded(trajectory)
            return recorded or self._rendered(str(file), atif_messages(json.loads(data)), [])
        except StoreError as error:
            raise ConfigError(
                f"{file}: is not an ATIF file: {error.field}: {error.message}",
                field=f"source {self.name}",
                fix=_SOURCES,
            ) from error

    def _is_wanted(self, trajectory: Trajectory) -> bool:
        if trajectory.status is Status.INFRASTRUCTURE:
            self.skipped["infrastructure failed"] += 1
            return False
        least, reward = self.config.min_reward, trajectory.reward
        if least is not None and (reward is None or reward.total < least):
            self.skipped["reward under min_reward"] += 1
            return False
        return True

    def _recorded(self, trajectory: Trajectory) -> list[Document]:
        """One document per segment with sampled tokens; tokens are unchanged."""
        documents: list[Document] = []
        for segment in trajectory.segments:
            if not segment.sampled.any():
                continue
            # Files of other programs do not name their tokenizer.
            known, largest = segment.tokenizer_digest, int(segment.tokens.max())
            if known not in ("", self.tokenizer.digest) or largest >= self.tokenizer.vocab_size:
                raise ConfigError(
                    f"the tokens of {trajectory.id} are of another tokenizer",
                    field=f"source {self.name}",
                    received=known or largest,
                    fix="fine-tune the model that wrote the sessions, or give them as messages",
                )
            documents.append(self._document(segment.tokens, segment.sampled))
        return documents

    def _document(self, tokens: NDArray[np.int32], sampled: NDArray[np.bool_]) -> Document:
        weights = np.where(sampled, 1.0, self.observation_weight).astype(np.float32)
        return Document(tokens, weights, sampled)

    def _chat(self, where: str, line: bytes) -> list[Document]:
        try:
            row = json.loads(line.decode("utf-8"))
            messages, tools = row["messages"], row.get("tools") or []
        except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{where}: is not a valid chat: {type(error).__name__}: {error}",
                field=f"source {self.name}",
                fix='write one object per line, with "messages" and optionally "tools"',
            ) from error
        return self._rendered(where, messages, tools)

    def _rendered(
        self, where: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> list[Document]:
        """Renders a chat; marks the answers, end tokens included. Empty if a call is invalid."""
        try:
            system, rest = read_messages(messages)
            opening = Opening(system, read_tools(list(tools)))
            if fault := _fault_of_calls(opening, rest):
                self.skipped[fault] += 1
                return []
            framing = Framing(self.open_renderers().find(opening), opening)
            parts: list[NDArray[np.int32]] = []
            marks: list[NDArray[np.bool_]] = []
            for message in (opening, *rest):
                first = not any(map(len, parts))
                if isinstance(message, Answer):
                    parts.append(framing.render_sampled(message, first))
                    marks.append(np.arange(len(parts[-1])) >= len(framing.answer_frame(first)))
                else:
                    before = parts[-1] if parts else framing.end[:0]
                    parts.append(framing.renderer.follow(before, framing.render_given(message, first)))
                    marks.append(np.zeros(len(parts[-1]), np.bool_))
        except (BadRequestError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{where}: {error}", field=f"source {self.name}", fix="correct the messages"
            ) from error
        if not rest and not len(parts[0]):
            raise ConfigError(f"{where}: has no messages", field=f"source {self.name}")
        return [self._document(np.concatenate(parts).astype(np.int32), np.concatenate(marks))]


def _fault_of_calls(opening: Opening, messages: Sequence[Message]) -> str:
    """Why learning these calls would teach mistakes; "" if not. A chat without `tools` may call any."""
    listed = {tool.name for tool in opening.tools}
    for call in (call for answer in messages if isinstance(answer, Answer) for call in answer.calls):
        if not isinstance(call.arguments, dict):
            return f"the arguments of a call of {call.name} are no JSON object"
        if listed and call.name not in listed:
            return f"a call of {call.name}, which is not among the tools of the chat"
    return ""


def split_heldout(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """(training, held-out): split by content, so that copies are on one side; training has at least one."""
    held = [xxhash.xxh32_intdigest(document.tokens.tobytes()) < share * _HASHES for document in documents]
    if all(held):
        held = [False] * len(documents)
    kept = [document for document, is_held in zip(documents, held, strict=True) if not is_held]
    return kept, [document for document, is_held in zip(documents, held, strict=True) if is_held]


def atif_messages(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of an ATIF document as chat messages. Raises StoreError where they are not valid."""
    messages: list[dict[str, Any]] = []
    try:
        for step in document["steps"]:
            words = step.get("message") or ""
            if step["source"] != "agent":
                messages.append({"role": step["source"], "content": words})
                continue
            calls = [
                {
                    "id": call["tool_call_id"],
                    "type": "function",
                    "function": {"name": call["function_name"], "arguments": json.dumps(call["arguments"])},
                }
                for call in step.get("tool_calls") or []
            ]
            answer = {"role": "assistant", "content": words, "tool_calls": calls}
            messages.append(answer | {"reasoning_content": step.get("reasoning_content") or ""})
            results = (step.get("observation") or {}).get("results") or []
            for place, result in enumerate(results):
                source = result.get("source_call_id") or (calls[place]["id"] if place < len(calls) else "")
                content = result.get("content") or ""
                messages.append({"role": "tool", "tool_call_id": source, "content": content})
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"is not valid ATIF: {type(error).__name__}: {error}", field="steps", fix="export it again"
        ) from error
    return messages
