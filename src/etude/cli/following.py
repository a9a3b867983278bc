"""Updates a running server with new weights: a run's checkpoints, as they are saved."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import WeightUpdateError
from etude.records import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

    from etude.cli.served_model import RunningEngine

_log = logging.getLogger("etude.following")
_POLL_S = 5.0
_Stamp = tuple[int, str, int, int]


class _OtherModelError(WeightUpdateError):
    """A checkpoint of another model, which this server cannot serve."""


@contextlib.asynccontextmanager
async def following(
    engine: RunningEngine, directory: Path | None, served: PolicyVersion, loaded: Path | None
) -> AsyncIterator[None]:
    """Polls `directory` for new weights within the block. None: does nothing."""
    from etude.kit.tasks import sweeping

    if directory is None:
        yield
        return
    follower = WeightFollower(engine, directory, served, loaded)
    async with sweeping(follower.poll, 2 * _POLL_S, _POLL_S):
        yield


@dataclass(slots=True, eq=False)
class WeightFollower:
    """Puts each new checkpoint of a directory into service: with the lineage and step that a run gave it, or
    as the next step of the lineage in service.

    That includes the checkpoint that is there at the start, unless it was the one loaded.
    """

    engine: RunningEngine
    directory: Path
    """A run, of which `latest` and `final` are followed, or a checkpoint directory that is replaced."""
    version: PolicyVersion
    """Version in service."""
    loaded: Path | None
    """The checkpoint directory that the engine started with."""
    _seen: _Stamp | None = field(init=False, default=None)
    """The checkpoint that is in service, or was refused."""
    _polled: _Stamp | None = field(init=False, default=None)
    """The checkpoint that the last poll found."""

    def __post_init__(self) -> None:
        found = self._newest()
        if found and self.loaded and Path(found[1]).resolve() == self.loaded.resolve():
            self._seen = found

    async def poll(self) -> None:
        """Puts the newest checkpoint into service if it is new and no longer being written, that is unchanged
        since the last poll. Failures are logged and retried, except for another model's checkpoint; the
        version in service stays."""
        try:
            found = await asyncio.to_thread(self._newest)
            before, self._polled = self._polled, found
            if found is None or found != before or found == self._seen:
                return
            await self._serve(Path(found[1]))
            self._seen = found
        except _OtherModelError as error:
            self._seen = self._polled
            _log.error("new weights are not served: %s", error)
        except Exception as error:  # polling continues after any error
            _log.error("new weights are not served yet, trying again: %s", error)

    async def _serve(self, checkpoint: Path) -> None:
        from etude.weights import describe_tensors

        version, tensors = await asyncio.to_thread(self._load, checkpoint)
        manifest = await asyncio.to_thread(describe_tensors, version, tensors, f"file:{checkpoint}")
        await self.engine.service.stage(manifest, tensors)
        await self.engine.service.activate(manifest.version)
        self.version = manifest.version
        _log.warning("now serving %s from %s", manifest.version, checkpoint)

    def _load(self, checkpoint: Path) -> tuple[PolicyVersion, Mapping[str, Tensor]]:
        from etude.model import LanguageModel
        from etude.model.huggingface import load_model
        from etude.training.checkpoints import load_checkpoint
        from etude.training.checkpoints.files import DIGESTS

        is_run = (checkpoint / DIGESTS).is_file()
        model, state = load_checkpoint(checkpoint) if is_run else (load_model(checkpoint), None)
        if not isinstance(model, LanguageModel) or model.config != self.engine.config:
            raise _OtherModelError(
                "is a checkpoint of another model",
                field="--follow",
                received=str(checkpoint),
                fix="start a new server for it",
            )
        version = replace(self.version, step=self.version.step + 1, digest="")
        if state is not None and "lineage" in state and "step" in state:
            version = replace(version, lineage=str(state["lineage"]), step=int(state["step"]))
        return version, dict(model.named_parameters())

    def _newest(self) -> _Stamp | None:
        """Modification time, path, size in bytes and inode of the newest checkpoint."""
        places = (self.directory, *(self.directory / "checkpoints" / name for name in ("latest", "final")))
        stamps: list[_Stamp] = []
        for place in places:
            with contextlib.suppress(OSError):  # being replaced: the next poll finds it
                config = (place / "config.json").stat()
                files = [config, *(file.stat() for file in place.glob("*.safetensors*"))]
                newest_ns, size = max(file.st_mtime_ns for file in files), sum(file.st_size for file in files)
                stamps.append((newest_ns, str(place), size, config.st_ino))
        return max(stamps, default=None)
