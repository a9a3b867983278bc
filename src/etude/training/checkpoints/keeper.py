"""Resumable checkpoints that are written while training continues.

    training ──copy to host memory──> writer thread ──> LATEST, atomically; its predecessor: into the history
                                  (of each rank)
       │ continues at once
       └─ the next save waits for this one; `due` is false until then, so periodic saves never wait

A full disk costs the checkpoint, not the run: the failure is counted and reported, older ones stay, and
training continues. Only `flush`, at the end of a stage, raises if the disk was full at the last save.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from etude.config import CheckpointConfig
from etude.errors import ResourceError
from etude.model.loading import AnyModel
from etude.observe import MetricSink, Observer
from etude.training.checkpoints.history import History
from etude.training.checkpoints.saving import save_checkpoint
from etude.training.checkpoints.shards import ModelShards, is_shard


@torch.no_grad()
def copy_model(model: AnyModel | ModelShards) -> AnyModel | ModelShards:
    """A copy in host memory of the model, or of this rank's shards of it, without gradients. Tied weights
    stay tied; `ops` is shared, not copied."""
    if isinstance(model, ModelShards):
        return replace(model, weights=copy_state(model.weights))
    known: dict[int, Any] = {id(model.ops): model.ops}
    for parameter in model.parameters():
        known[id(parameter)] = nn.Parameter(_host(parameter), requires_grad=False)
    for buffer in model.buffers():
        known[id(buffer)] = _host(buffer)
    return copy.deepcopy(model, known)


def copy_state(value: Any) -> Any:
    """A deep copy of nested plain values and tensors, with tensors in host memory."""
    if isinstance(value, Tensor):
        return _host(value)
    if isinstance(value, Mapping):
        return {key: copy_state(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_state(entry) for entry in value)
    return copy.deepcopy(value)


def _host(tensor: Tensor) -> Tensor:
    if is_shard(tensor):
        from etude.training.checkpoints.shard_files import part_on_host

        return part_on_host(tensor)
    return tensor.detach().to("cpu", copy=True)


KIND = "checkpoint"
"""Kind of the metrics row written for each save."""


class CheckpointKeeper:
    """Saves a run's resumable checkpoints. Called by one thread; writes in another.

    A context manager: its exit waits for the save in flight, and raises that save's error unless another
    exception is being raised.
    """

    def __init__(
        self, latest: Path, settings: CheckpointConfig, metrics: MetricSink, observer: Observer
    ) -> None:
        """`latest`: path of the newest checkpoint."""
        self._latest = latest
        self._settings = settings
        self._metrics = metrics
        self._observer = observer
        self._history = History(latest)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[float] | None = None
        self._saved_at = time.monotonic()
        self._blocked_s = 0.0
        self._step = 0
        self._num_failed = 0
        self._failure: ResourceError | None = None

    def __enter__(self) -> CheckpointKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._pool.shutdown(wait=True)

    @property
    def due(self) -> bool:
        """Whether the next periodic save is due: never while one is being written."""
        waited = time.monotonic() - self._saved_at > self._settings.every_s
        return waited and (self._writing is None or self._writing.done())

    def save(
        self,
        model: AnyModel | ModelShards | None,
        state: Mapping[str, Any],
        write_more: Callable[[Path], object] | None = None,
    ) -> None:
        """Copies model and state, and returns; the checkpoint is on disk at the latest after `flush`.

        `state` has the keys `stage` and `step`, and optionally `score` (higher is better). Waits for an
        earlier save that is still being written, and raises that save's error unless it was a full disk.
        """
        began = time.monotonic()
        self._finish()
        self._step = int(state.get("step", 0))
        if self._settings.asynchronous:
            model, state = None if model is None else copy_model(model), copy_state(state)
        self._writing = self._pool.submit(self._write, model, state, write_more)
        if not self._settings.asynchronous:
            self._writing.exception()  # waits; `_finish` raises it
        self._saved_at = time.monotonic()
        self._blocked_s = self._saved_at - began

    def write(self, directory: Path, model: AnyModel | ModelShards | None, state: Mapping[str, Any]) -> None:
        """`save` as a WriteCheckpoint, for a trainer that assembles its own state."""
        assert directory == self._latest, "the newest checkpoint has one place"
        self.save(model, state)

    def flush(self) -> None:
        """Waits for the save in flight and raises its error: ResourceError if the disk was full."""
        self._finish()
        if self._failure is not None:
            raise self._failure

    def _finish(self) -> None:
        """Waits for the save in flight, reports its outcome, raises its error but for a full disk."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            written_s = writing.result()
        except ResourceError as error:
            self._failure = error
            self._num_failed += 1
            self._metrics.write(KIND, self._step, {"failed_disk_full": float(self._num_failed)})
            self._observer.say(f"the checkpoint of step {self._step} was not written: {error.message}")
            return
        self._failure = None
        self._metrics.write(KIND, self._step, {"blocked_s": self._blocked_s, "written_s": written_s})

    def _write(
        self,
        model: AnyModel | ModelShards | None,
        state: Mapping[str, Any],
        write_more: Callable[[Path], object] | None,
    ) -> float:
        """Writes the checkpoint, in the writer thread; returns the duration in seconds."""
        began = time.monotonic()
        save_checkpoint(self._latest, model, state, write_more, self._history.add)
        self._history.prune(self._settings)
        return time.monotonic() - began


class FollowerWriter:
    """Writes the shards of a rank other than the first, which has the keeper. Implements WriteCheckpoint.

    As with the keeper, an error is raised by the next save; a full disk is reported by the keeper alone.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        """`asynchronous`: see CheckpointConfig."""
        self._asynchronous = asynchronous
        self._pool = ThreadPoolExecutor(1, "shards")
        self._writing: Future[None] | None = None

    def __call__(
        self, directory: Path, model: AnyModel | ModelShards | None, state: Mapping[str, Any]
    ) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            with contextlib.suppress(ResourceError):
                writing.result()
        if self._asynchronous:
            model, state = None if model is None else copy_model(model), copy_state(state)
        self._writing = self._pool.submit(save_checkpoint, directory, model, state)
        if not self._asynchronous:
            self._writing.exception()  # waits
