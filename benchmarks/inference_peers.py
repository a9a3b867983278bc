"""Peers of the inference benchmark: their settings, and the worker processes that play the workload.

Every setting of a peer that might be its fastest is a variant of its own; the benchmark tries all of them and
keeps the best. A peer that is not available here, fails or takes too long is absent, with the reason.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import python_of

_WORKERS = Path(__file__).parent / "inference_workers"
_QUOTED_CHARACTERS = 1500
"""How much of the end of a worker's log a reason quotes."""


class PeerFailedError(Exception):
    """A worker died, answered malformed data or took too long. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One peer with one choice of settings."""

    peer: str
    label: str
    worker: str
    """File name of the worker."""
    settings: Mapping[str, Any]
    environment: str | None = None
    """Environment whose interpreter runs it; None: this one."""


def variants(peer: str, scenario: str, max_tokens: int, num_sessions: int) -> list[Variant]:
    """All settings of a peer to try; empty if it does not support this model."""
    made = _MAKERS[peer](scenario, max_tokens, num_sessions)
    shared = {"max_tokens": max_tokens, "sessions": num_sessions}
    return [
        Variant(peer, label, worker, shared | settings, environment)
        for label, worker, settings, environment in made
    ]


_Made = list[tuple[str, str, dict[str, Any], str | None]]


def _ours(scenario: str, max_tokens: int, num_sessions: int) -> _Made:
    del scenario, max_tokens, num_sessions
    return [
        (f"{threads} threads, {label}", "etude_worker.py", {"threads": threads, "delay_steps": delay}, None)
        for threads in (1, 2)
        for label, delay in (("as they come", None), ("on a schedule", 4))
    ]


def _bfloat16(scenario: str, max_tokens: int, num_sessions: int) -> _Made:
    del max_tokens, num_sessions
    settings = {"threads": 2, "weights": "bfloat16", "delay_steps": 4}
    return [("2 threads, bfloat16 weights", "etude_worker.py", settings, None)] if scenario == "large" else []


def _experts(scenario: str) -> list[dict[str, Any]]:
    """Settings of the grouped expert product: `batched_mm` took seven times as long on a short workload."""
    return [{"experts": "grouped_mm"}] if scenario == "moe" else [{}]


def _generate(scenario: str, max_tokens: int, num_sessions: int) -> _Made:
    del max_tokens, num_sessions
    made: _Made = []
    for threads in (1, 2):
        for experts in _experts(scenario):
            for keep in (True, False):
                label = ", ".join(
                    [f"{threads} threads", *experts.values(), "cache kept" if keep else "cache not kept"]
                )
                settings = {"threads": threads, "keep_cache": keep} | experts
                made.append((label, "generate_worker.py", settings, None))
    return made


def _continuous(scenario: str, max_tokens: int, num_sessions: int) -> _Made:
    made: _Made = []
    for threads in (1, 2):
        for experts in _experts(scenario)[:1]:
            for page_tokens in (32,):
                pages = num_sessions * (max_tokens // page_tokens + 2)
                settings = {"threads": threads, "page_tokens": page_tokens, "pages": pages}
                label = ", ".join([f"{threads} threads", *experts.values(), f"pages of {page_tokens}"])
                made.append(
                    (label, "continuous_worker.py", settings | {"batch_tokens": 2048} | experts, None)
                )
    return made


def _vllm(scenario: str, max_tokens: int, num_sessions: int) -> _Made:
    del scenario, max_tokens, num_sessions
    made: _Made = []
    for threads in (1, 2):
        for eager in (True, False):
            settings = {"threads": threads, "eager": eager, "page_tokens": 32}
            label = f"{threads} threads, {'eager' if eager else 'compiled'}"
            made.append((label, "vllm_worker.py", settings, "vllm"))
    return made


def _llama_cpp(scenario: str, max_tokens: int, num_sessions: int) -> _Made:
    del max_tokens, num_sessions
    if scenario == "moe":
        return []
    made: _Made = []
    for threads in (1, 2):
        for unified in (True, False):
            settings = {"threads": threads, "unified": unified, "batch_tokens": 512}
            label = f"{threads} threads, {'one cache' if unified else 'a cache per session'}"
            made.append((label, "llama_cpp_worker.py", settings, "llama-cpp"))
    return made


_MAKERS: Mapping[str, Callable[[str, int, int], _Made]] = {
    "ours": _ours,
    "ours_bfloat16": _bfloat16,
    "transformers_generate": _generate,
    "transformers_continuous": _continuous,
    "vllm": _vllm,
    "llama_cpp": _llama_cpp,
}
PEERS = tuple(_MAKERS)
"""Names of all peers; ours first."""


@dataclass(slots=True)
class Played:
    """Timing of one workload on one worker."""

    wall_s: float
    processor_s: float
    output_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of wall time."""
        return self.output_tokens / self.wall_s


class Worker:
    """A process that has loaded a model and plays workloads. Use as a context manager."""

    def __init__(self, variant: Variant, checkpoint: Path, log: Path, start_limit_s: float = 600.0) -> None:
        """Starts the process. Raises PeerFailedError if it is not ready in time, after ending it."""
        self.variant = variant
        self._log = log
        try:
            python = sys.executable if variant.environment is None else str(python_of(variant.environment))
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerFailedError(f"its environment cannot be made: {error}") from error
        settings = json.dumps(dict(variant.settings) | {"checkpoint": str(checkpoint)})
        command = [python, str(_WORKERS / variant.worker), settings]
        environment = os.environ | {"OMP_NUM_THREADS": str(variant.settings["threads"])}
        if variant.environment is not None:
            environment.pop("PYTHONPATH", None)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )
        try:
            self._answer(start_limit_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play(self, workload: Path, limit_s: float) -> Played:
        """Plays one workload. Raises PeerFailedError, after which the worker cannot be used."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{workload}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerFailedError(self._last_words("died")) from error
        values = self._answer(limit_s)
        return Played(values["wall_s"], values["processor_s"], int(values["output_tokens"]))

    def close(self) -> None:
        """Ends the process and its children."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def _answer(self, limit_s: float) -> dict[str, float]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise PeerFailedError(self._last_words(f"took more than {limit_s:.0f} s"))
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    raise PeerFailedError(self._last_words("died"))
                received += piece
        return json.loads(received)

    def _last_words(self, reason: str) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return f"{reason}: {text[-_QUOTED_CHARACTERS:]}" if text else reason


def fastest(times: Mapping[str, Played], among: Sequence[str]) -> str:
    """The label with the shortest time."""
    return min(among, key=lambda label: times[label].wall_s)
