"""Worker for llama.cpp: one context of many sequences, batched continuously through its C interface.

Its Python class supports one sequence only, so the loop is ours, in the manner of llama.cpp's own server: a
token for each session that answers, then as much of the waiting inputs as fits, one `llama_decode` for all. A
session keeps its sequence, and so its keys. Tokens are the likeliest ones, by numpy over all logits at once.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf_checkpoint import write_gguf
from work_protocol import Player, Sessions, Tokens, play_with, serve


class LlamaBatcher:
    """See Batcher. Sessions are sequences of the same number."""

    def __init__(self, context: Any, vocab_size: int, batch_tokens: int) -> None:
        self._context = context
        self._vocab_size = vocab_size
        self._batch_tokens = batch_tokens
        self._pending: dict[int, Tokens] = {}
        self._sampled: dict[int, Tokens] = {}
        self._wanted: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._last: dict[int, Tokens] = {}
        self._tokens, self._positions, self._members, self._counts = np.zeros((4, batch_tokens), np.int32)
        self._counts[:] = 1
        self._flags = np.zeros(batch_tokens, np.int8)
        self._pointers = self._members.ctypes.data + 4 * np.arange(batch_tokens, dtype=np.uintp)

    def clear_cache(self) -> None:
        """Empties the cache before the next workload."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._length.clear()
        self._last.clear()

    def add(self, session: int, history: Tokens, new: int, output: int) -> None:
        """See Batcher. The last answer's last token has not been computed yet."""
        self._pending[session] = self._last.pop(session, []) + history[len(history) - new :]
        self._sampled[session], self._wanted[session] = [], output

    def wait(self) -> list[tuple[int, Tokens]]:
        """See Batcher: one step."""
        drawing, count = self._fill()
        batch = llama_cpp.llama_batch(n_tokens=count)
        batch.token = self._tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
        batch.pos = self._positions.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos))
        batch.n_seq_id = self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.seq_id = ctypes.cast(self._pointers.ctypes.data, type(batch.seq_id))
        batch.logits = self._flags.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        return self._draw(drawing) if drawing else []

    def _fill(self) -> tuple[list[int], int]:
        """Fills the batch, decoding sessions (short rows) first: (sessions that sample, number of rows)."""
        drawing: list[int] = []
        count = 0
        for session in sorted(self._pending, key=lambda s: len(self._pending[s])):
            waiting = self._pending[session]
            taken = min(len(waiting), self._batch_tokens - count)
            if not taken:
                break
            rows, start = slice(count, count + taken), self._length.get(session, 0)
            self._tokens[rows] = waiting[:taken]
            self._positions[rows] = np.arange(start, start + taken)
            self._members[rows] = session
            self._flags[rows] = 0
            self._length[session] = start + taken
            count += taken
            self._pending[session] = waiting[taken:]
            if taken == len(waiting):
                self._flags[count - 1] = 1
                drawing.append(session)
                del self._pending[session]
        return drawing, count

    def _draw(self, drawing: list[int]) -> list[tuple[int, Tokens]]:
        logits = llama_cpp.llama_get_logits(self._context)
        drawn = np.ctypeslib.as_array(logits, (len(drawing), self._vocab_size)).argmax(1).tolist()
        complete: list[tuple[int, Tokens]] = []
        for session, token in zip(drawing, drawn, strict=True):
            self._sampled[session].append(token)
            if len(self._sampled[session]) < self._wanted[session]:
                self._pending[session] = [token]
            else:
                self._last[session] = [token]
                complete.append((session, self._sampled[session]))
        return complete


def make_batcher(settings: dict[str, Any]) -> LlamaBatcher:
    """The model and its context. Settings: see `make_player`."""
    file = Path(settings["checkpoint"]) / "model.gguf"
    if not file.exists():
        write_gguf(Path(settings["checkpoint"]), file)
    llama_cpp.llama_log_set(_QUIET, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    page = 256
    per_session = -(-settings["max_tokens"] // page) * page
    params.n_seq_max = settings["sessions"]
    params.n_ctx = settings["sessions"] * per_session
    params.n_batch = settings["batch_tokens"]
    params.n_ubatch = min(settings["batch_tokens"], 512)
    params.n_threads = params.n_threads_batch = settings["threads"]
    params.kv_unified = settings["unified"]
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("no context")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return LlamaBatcher(context, vocab_size, settings["batch_tokens"])


def make_player(settings: dict[str, Any]) -> Player:
    """See `Player`. Settings: checkpoint, threads, sessions, max_tokens, batch_tokens, unified."""
    batcher = make_batcher(settings)

    def player(sessions: Sessions) -> int:
        batcher.clear_cache()
        return play_with(batcher, sessions)

    return player


@llama_cpp.llama_log_callback
def _QUIET(level: int, text: bytes, data: Any) -> None:
    del level, text, data


if __name__ == "__main__":
    serve(make_player)
