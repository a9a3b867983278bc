"""New weights for a server while it runs: a run's checkpoints, as they are saved."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import EtudeError, WeightUpdateError
from etude.records import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

    from etude.cli.served_model import RunningEngine

_log = logging.getLogger("etude.following")
_POLL_S = 5.0
_Stamp = tuple[int, str, int]


@contextlib.asynccontextmanager
async def following(
    engine: RunningEngine, directory: Path | None, served: PolicyVersion
) -> AsyncIterator[None]:
    """Looks for new weights in `directory` while the block lasts. None: nowhere."""
    from etude.serving.sweeping import sweeping

    if directory is None:
        yield
        return
    follower = WeightFollower(engine, directory, served)
    async with sweeping(follower.look, 2 * _POLL_S, _POLL_S):
        yield


@dataclass(slots=True, eq=False)
class WeightFollower:
    """Puts each new checkpoint of a directory into service, as the next step of the lineage that is served.

    What the directory holds when it begins is taken for what is served already.
    """

    engine: RunningEngine
    directory: Path
    """A run, whose `latest` and `final` count, or a checkpoint that is replaced."""
    version: PolicyVersion
    """In service."""
    _seen: _Stamp | None = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self._newest()

    async def look(self) -> None:
        """Puts the newest checkpoint into service if it is another one. What cannot be used is reported, and
        the version in service stays."""
        found = await asyncio.to_thread(self._newest)
        if found is None or found == self._seen:
            return
        self._seen = found
        try:
            await self._serve(Path(found[1]))
        except EtudeError as error:
            _log.error("new weights are not served: %s", error)

    async def _serve(self, checkpoint: Path) -> None:
        from etude.weights import describe_tensors

        version = replace(self.version, step=self.version.step + 1, digest="")
        tensors = await asyncio.to_thread(self._load, checkpoint)
        manifest = await asyncio.to_thread(describe_tensors, version, tensors, f"file:{checkpoint}")
        weights, service = self.engine.weights, self.engine.service
        weights.hold(manifest.version, tensors)
        try:
            await service.stage(manifest)
            await service.activate(manifest.version)
        finally:
            weights.let_go(manifest.version)
        self.version = manifest.version
        _log.warning("%s is served, from %s", manifest.version, checkpoint)

    def _load(self, checkpoint: Path) -> Mapping[str, Tensor]:
        from etude.model import LanguageModel
        from etude.model.huggingface import load_model
        from etude.training.checkpoints import load_checkpoint
        from etude.training.checkpoints.files import DIGESTS

        is_run = (checkpoint / DIGESTS).is_file()
        model = load_checkpoint(checkpoint)[0] if is_run else load_model(checkpoint)
        if not isinstance(model, LanguageModel) or model.config != self.engine.config:
            raise WeightUpdateError(
                "a checkpoint of another model",
                field="--follow",
                received=str(checkpoint),
                fix="serve it afresh",
            )
        return dict(model.named_parameters())

    def _newest(self) -> _Stamp | None:
        """When the newest checkpoint was written, where it lies, and which file it is."""
        places = (self.directory, *(self.directory / "checkpoints" / name for name in ("latest", "final")))
        stamps: list[_Stamp] = []
        for place in places:
            with contextlib.suppress(OSError):  # being replaced: the next look finds it
                found = (place / "config.json").stat()
                stamps.append((found.st_mtime_ns, str(place), found.st_ino))
        return max(stamps, default=None)
