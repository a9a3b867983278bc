"""Token ids, log-probabilities, versions and routes of answers, as binary frames beside the JSON.

A request with `x-etude-extensions: tokens` gets, in its answer's `x-etude-side-channel` header, a path; once
the answer is complete, `GET` on it returns the frames of all its choices. They are kept for a while, for the
key that asked. So the answer itself stays what OpenAI's clients expect, streamed or not, and routes (about
1 KB a token on the largest models) never become JSON.

    body   := "ETSC" version:u16 choices:u16 frame* end
    frame  := tag:4 bytes, choice:u16, dtype:u8, rank:u8, start:u64, shape:u32[rank], length:u64,
              xxh3_64:u64 of all else in the frame, payload:length bytes      numbers are little-endian
    end    := a frame with tag "END.", choice = number of frames before it, no payload

    PROM int32 [p]             the prompt          TOKS int32 [n]           the sampled tokens
    LOGP float32 [n]           processed           RAWL float32 [n]         raw, where asked for
    VERS uint8 [bytes]         JSON: [[start, end, version, kv_oldest], ...], places among the n
    ROUT uint8 | uint16 [r, layers, top_k]         of the positions from `start` on, prompt included

Positions before the first routes' `start` were computed with an earlier request of the conversation. Of the
last sampled token nothing is computed yet.
"""

from __future__ import annotations

import json
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from etude.errors import StoreError
from etude.inference.headers import EXTENSIONS_HEADER
from etude.inference.server.errors import NoSuchAnswerError
from etude.records import PolicyVersion, SampleChunk

SIDE_CHANNEL_PATH = "/v1/side_channel"
WANT_TOKENS = {EXTENSIONS_HEADER: "tokens"}
"""Headers of a request whose tokens are wanted: `extra_headers` of OpenAI's client."""

MAGIC = b"ETSC"
FORMAT_VERSION = 1
_HEAD = struct.Struct("<4sHH")
_FRAME = struct.Struct("<4sHBBQ")
_CHECKSUM = struct.Struct("<Q")
_DTYPES: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("int32", "float32", "uint8", "uint16", "int64")
)
_END = b"END."
_MAX_RANK = 3


@dataclass(frozen=True, slots=True)
class Span:
    """Which policy sampled the tokens from `start` to `end` (among the sampled ones)."""

    start: int
    end: int
    version: PolicyVersion
    kv_oldest: PolicyVersion
    """Oldest version that these tokens attended to."""


@dataclass(slots=True, eq=False)
class ChoiceTokens:
    """One answer in tokens: n sampled after p of the prompt."""

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    raw_logprobs: NDArray[np.float32] | None = None
    spans: tuple[Span, ...] = ()
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[r, layers, top_k] of the positions from `routes_start` on; None for a dense model."""
    routes_start: int = 0


@dataclass(slots=True, eq=False)
class ChoiceRecorder:
    """Collects one answer's chunks."""

    prompt: NDArray[np.int32]
    _chunks: list[SampleChunk] = field(default_factory=list[SampleChunk])

    def take(self, chunk: SampleChunk) -> None:
        """Takes a chunk in."""
        self._chunks.append(chunk)

    def result(self) -> ChoiceTokens:
        """The chunks together. Later routes of a position replace earlier ones."""
        chunks = self._chunks
        raw = [chunk.raw_logprobs for chunk in chunks if chunk.raw_logprobs is not None]
        routes, start = _merged_routes(chunks)
        return ChoiceTokens(
            prompt=self.prompt,
            tokens=np.concatenate([np.zeros(0, dtype=np.int32), *(chunk.tokens for chunk in chunks)]),
            logprobs=np.concatenate([np.zeros(0, dtype=np.float32), *(chunk.logprobs for chunk in chunks)]),
            raw_logprobs=np.concatenate(raw) if raw else None,
            spans=_spans(chunks),
            routes=routes,
            routes_start=start,
        )


def _merged_routes(chunks: Sequence[SampleChunk]) -> tuple[Any, int]:
    rows = [(chunk.routes_start, chunk.routes) for chunk in chunks if chunk.routes is not None]
    rows = [(start, routes) for start, routes in rows if len(routes)]
    if not rows:
        return None, 0
    first = min(start for start, _ in rows)
    end = max(start + len(routes) for start, routes in rows)
    dtype = rows[0][1].dtype
    merged = np.full((end - first, *rows[0][1].shape[1:]), np.iinfo(dtype).max, dtype=dtype)
    for start, routes in rows:
        merged[start - first : start - first + len(routes)] = routes
    return merged, first


def _spans(chunks: Sequence[SampleChunk]) -> tuple[Span, ...]:
    spans: list[Span] = []
    place = 0
    for chunk in chunks:
        start, place = place, place + len(chunk.tokens)
        if start == place:
            continue
        if spans and (spans[-1].version, spans[-1].kv_oldest) == (chunk.version, chunk.kv_oldest):
            start = spans.pop().start
        spans.append(Span(start, place, chunk.version, chunk.kv_oldest))
    return tuple(spans)


# ---- frames -------------------------------------------------------------------------------------


def encode(choices: Sequence[ChoiceTokens]) -> bytes:
    """The frames of an answer."""
    parts = [_HEAD.pack(MAGIC, FORMAT_VERSION, len(choices))]
    num_frames = 0
    for index, choice in enumerate(choices):
        for tag, start, array in _arrays(choice):
            parts.append(_frame(tag, index, start, array))
            num_frames += 1
    return b"".join([*parts, _frame(_END, num_frames, 0, np.zeros(0, dtype=np.uint8))])


def _arrays(choice: ChoiceTokens) -> Iterator[tuple[bytes, int, NDArray[Any]]]:
    yield b"PROM", 0, choice.prompt
    yield b"TOKS", len(choice.prompt), choice.tokens
    yield b"LOGP", len(choice.prompt), choice.logprobs
    if choice.raw_logprobs is not None:
        yield b"RAWL", len(choice.prompt), choice.raw_logprobs
    rows = [[one.start, one.end, asdict(one.version), asdict(one.kv_oldest)] for one in choice.spans]
    yield b"VERS", 0, np.frombuffer(json.dumps(rows).encode(), dtype=np.uint8)
    if choice.routes is not None:
        yield b"ROUT", choice.routes_start, choice.routes


def _frame(tag: bytes, choice: int, start: int, array: NDArray[Any]) -> bytes:
    payload = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    head = _FRAME.pack(tag, choice, _DTYPES.index(array.dtype), array.ndim, start)
    head += struct.pack(f"<{array.ndim}IQ", *array.shape, len(payload))
    return b"".join([head, _CHECKSUM.pack(xxh3_64_intdigest(head + payload)), payload])


def decode(body: bytes) -> list[ChoiceTokens]:
    """What `encode` was given. Raises StoreError for a body that is cut, damaged or of another format."""
    try:
        return _decode(body)
    except (struct.error, ValueError, KeyError, TypeError, IndexError) as error:
        message = f"the frames are damaged: {error}"
        raise StoreError(message, field="side_channel", fix="fetch them again") from error


def _decode(body: bytes) -> list[ChoiceTokens]:
    magic, version, num_choices = _HEAD.unpack_from(body, 0)
    if (magic, version) != (MAGIC, FORMAT_VERSION):
        raise ValueError(f"neither {MAGIC!r} nor version {FORMAT_VERSION}: {magic!r}, {version}")
    found: list[dict[bytes, tuple[int, NDArray[Any]]]] = [{} for _ in range(num_choices)]
    offset, num_frames = _HEAD.size, 0
    while True:
        tag, choice, start, array, offset = _read_frame(body, offset)
        if tag == _END:
            if choice != num_frames or offset != len(body):
                raise ValueError(f"{num_frames} frames, not {choice}, in {offset} of {len(body)} bytes")
            return [_choice(frames) for frames in found]
        found[choice][tag] = (start, array)
        num_frames += 1


def _read_frame(body: bytes, offset: int) -> tuple[bytes, int, int, NDArray[Any], int]:
    tag, choice, dtype, rank, start = _FRAME.unpack_from(body, offset)
    if rank > _MAX_RANK or dtype >= len(_DTYPES):
        raise ValueError(f"dtype {dtype} of rank {rank}")
    numbers = struct.Struct(f"<{rank}IQ")
    *shape, length = numbers.unpack_from(body, offset + _FRAME.size)
    end = offset + _FRAME.size + numbers.size
    (checksum,) = _CHECKSUM.unpack_from(body, end)
    head, offset = body[offset:end], end + _CHECKSUM.size
    payload = body[offset : offset + length]
    if len(payload) != length or xxh3_64_intdigest(head + payload) != checksum:
        raise ValueError(f"frame {tag!r} is cut or altered")
    array = np.frombuffer(payload, dtype=_DTYPES[dtype].newbyteorder("<")).astype(_DTYPES[dtype])
    return tag, choice, start, array.reshape(shape), offset + length


def _choice(frames: dict[bytes, tuple[int, NDArray[Any]]]) -> ChoiceTokens:
    rows = json.loads(frames[b"VERS"][1].tobytes())
    routes_start, routes = frames.get(b"ROUT", (0, None))
    return ChoiceTokens(
        prompt=frames[b"PROM"][1],
        tokens=frames[b"TOKS"][1],
        logprobs=frames[b"LOGP"][1],
        raw_logprobs=frames[b"RAWL"][1] if b"RAWL" in frames else None,
        spans=tuple(Span(a, b, PolicyVersion(**one), PolicyVersion(**other)) for a, b, one, other in rows),
        routes=routes,
        routes_start=routes_start,
    )


# ---- keeping ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    body: bytes
    key_name: str
    until_s: float


class SideChannel:
    """The frames of answers until they are fetched; bounded in bytes, the oldest go first."""

    def __init__(
        self,
        keep_s: float = 300.0,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._num_bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def put(self, answer_id: str, key_name: str, body: bytes) -> None:
        """Keeps the frames of an answer."""
        self._kept[answer_id] = _Kept(body, key_name, self._clock() + self._keep_s)
        self._num_bytes += len(body)
        now_s = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            if self._num_bytes <= self._max_bytes and self._kept[oldest].until_s >= now_s:
                return
            self._num_bytes -= len(self._kept.pop(oldest).body)

    def get(self, answer_id: str, key_name: str) -> bytes:
        """The frames. Raises NoSuchAnswerError: not complete, another key's, or no longer kept."""
        kept = self._kept.get(answer_id)
        if kept is None or kept.key_name != key_name or kept.until_s < self._clock():
            raise NoSuchAnswerError(
                "no tokens of this answer are held",
                field="id",
                received=answer_id,
                fix=f"fetch them within {self._keep_s:g} s after the answer's end, with the key that asked",
            )
        return kept.body
