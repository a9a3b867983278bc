"""How a cluster learns of the end of a run that does not answer any more."""

from __future__ import annotations

import asyncio

from etude.errors import StoreError
from etude.weights.ending import read_over
from etude.weights.folders import Folder

_LOOK_S = 2.0
"""For which a look may hold up who looks."""


class EndMark:
    """The mark that a run leaves in its weight store, which outlives its process. For one event loop."""

    def __init__(self, folder: Folder) -> None:
        """`folder`: the weight store, as it is read here."""
        self._folder = folder
        self._looking: asyncio.Task[bool] | None = None

    async def is_set(self) -> bool:
        """Whether the run is over. False where the store does not say so in time: it may be away as well."""
        looking = self._looking
        if looking is None:
            looking = self._looking = asyncio.create_task(asyncio.to_thread(self._look))
        await asyncio.wait({looking}, timeout=_LOOK_S)
        if not looking.done():
            return False
        if self._looking is looking:
            self._looking = None
        return looking.result()

    def _look(self) -> bool:
        try:
            return read_over(self._folder) is not None
        except StoreError:
            return False
