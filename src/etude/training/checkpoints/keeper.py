"""Resumable checkpoints that are written while training goes on.

    training ──copy to host memory──> writer thread ──> LATEST, atomically; what was there: into the history
                                  (of each rank)
       │ goes on at once
       └─ the next save waits for this one; `due` is false until then, so periodic saves never wait

A full disk costs the checkpoint, not the run: the save is counted and reported, older ones stay, and training
goes on. Only `flush`, at the end of a stage, raises if the last save found no room.
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
    """The model as it is now, or what of it lies here, without gradients. Tied weights stay tied; what
    computes (`ops`) is shared."""
    if isinstance(model, ModelShards):
        return replace(model, weights=copy_state(model.weights))
    known: dict[int, Any] = {id(model.ops): model.ops}
    for parameter in model.parameters():
        known[id(parameter)] = nn.Parameter(_host(parameter), requires_grad=False)
    for buffer in model.buffers():
        known[id(buffer)] = _host(buffer)
    return copy.deepcopy(model, known)


def copy_state(value: Any) -> Any:
    """Plain values and tensors, nested: copied, tensors into host memory."""
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
"""Of the rows of metrics: one per save."""


class CheckpointKeeper:
    """Saves a run's resumable checkpoints. Used by one thread; writes in another.

    A context manager: leaving it waits for the save in flight, and raises what that raised unless something
    else is being raised.
    """

    def __init__(
        self, latest: Path, settings: CheckpointConfig, metrics: MetricSink, observer: Observer
    ) -> None:
        """`latest`: where the newest goes."""
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
        """Whether it is time for the next periodic save: never while one is being written."""
        waited = time.monotonic() - self._saved_at > self._settings.every_s
        return waited and (self._writing is None or self._writing.done())

    def save(
        self,
        model: AnyModel | ModelShards | None,
        state: Mapping[str, Any],
        write_more: Callable[[Path], object] | None = None,
    ) -> None:
        """Copies everything and returns; it is on disk some time later, at the latest after `flush`.

        `state` names its `stage` and its `step`, and perhaps a `score`, of which more is better. Waits for an
        earlier save that is still being written, and raises what that one raised, but for a full disk.
        """
        began = time.monotonic()
        self._finish()
        self._step = int(state.get("step", 0))
        if self._settings.asynchronous:
            copied = copy_model(model) if model is not None else None
            self._writing = self._pool.submit(self._write, copied, copy_state(state), write_more)
        else:
            self._writing = self._pool.submit(self._write, model, state, write_more)
            self._writing.exception()  # waits; `_finish` raises it
        self._saved_at = time.monotonic()
        self._blocked_s = self._saved_at - began

    def write(
        self, directory: Path, model: AnyModel | ModelShards | None, state: Mapping[str, Any] | None = None
    ) -> None:
        """`save` as a WriteCheckpoint, for a trainer that puts its own state together."""
        assert directory == self._latest, "the newest checkpoint has one place"
        self.save(model, state or {})

    def flush(self) -> None:
        """Waits for the save in flight. Raises what it raised; ResourceError if the disk was full."""
        self._finish()
        if self._failure is not None:
            raise self._failure

    def _finish(self) -> None:
        """Waits for the save in flight, and tells how it went. Raises what it raised, but for a full disk."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            written_s = writing.result()
        except ResourceError as error:
            self._failure = error
            self._num_failed += 1
            self._metrics.write(KIND, self._step, {"failed_disk_full": float(self._num_failed)})
            self._observer.say(f"the checkpoint of step {self._step} is not written: {error.message}")
            return
        self._failure = None
        self._metrics.write(KIND, self._step, {"blocked_s": self._blocked_s, "written_s": written_s})

    def _write(
        self,
        model: AnyModel | ModelShards | None,
        state: Mapping[str, Any],
        write_more: Callable[[Path], object] | None,
    ) -> float:
        """In the writer thread. Returns the seconds that it took."""
        began = time.monotonic()
        save_checkpoint(self._latest, model, state, write_more, self._history.add)
        self._history.prune(self._settings)
        return time.monotonic() - began


class FollowingWriter:
    """What every rank but the first, which has the keeper, writes its shards with. Implements
    WriteCheckpoint.

    What fails is raised by the next save, as by the keeper; a full disk is the keeper's to tell.
    """

    def __init__(self, *, asynchronous: bool) -> None:
        """`asynchronous`: see CheckpointConfig."""
        self._asynchronous = asynchronous
        self._pool = ThreadPoolExecutor(1, "shards")
        self._writing: Future[None] | None = None

    def __call__(
        self, directory: Path, model: AnyModel | ModelShards | None, state: Mapping[str, Any] | None = None
    ) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            with contextlib.suppress(ResourceError):
                writing.result()
        if self._asynchronous:
            model, state = copy_model(model) if model is not None else None, copy_state(state or {})
        self._writing = self._pool.submit(save_checkpoint, directory, model, state)
        if not self._asynchronous:
            self._writing.exception()  # waits
