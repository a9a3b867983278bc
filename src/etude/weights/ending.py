"""The mark in a weight store that its run has ended, for readers that find the run's server down.

over/run.json     exists from the end of a run's reinforcement learning until the next run on this store
"""

from __future__ import annotations

import asyncio
import json

from etude.errors import StoreError
from etude.weights.folders import Folder, MissingError

_MARK = "over/run.json"


def mark_over(folder: Folder, run: str) -> None:
    """Marks the run of this name as ended. Raises StoreError."""
    folder.write(_MARK, json.dumps({"run": run}).encode())


def clear_over(folder: Folder) -> None:
    """Removes the mark, when a run begins or resumes. Raises StoreError."""
    folder.delete(_MARK)


def read_over(folder: Folder) -> str | None:
    """The name of the ended run; None while one is running, or none has begun. Raises StoreError."""
    try:
        data = folder.read(_MARK)
    except MissingError:
        return None
    try:
        return str(json.loads(data)["run"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError("is not a valid mark of a run's end", field=_MARK, received=folder.url) from error


_LOOK_S = 2.0
"""Longest time that `is_set` waits for the store."""


class EndMark:
    """Reads the end mark of a run from its weight store, which outlives its process. For one event loop."""

    def __init__(self, folder: Folder) -> None:
        """`folder`: the weight store, for reading."""
        self._folder = folder
        self._looking: asyncio.Task[bool] | None = None

    async def is_set(self) -> bool:
        """Whether the run has ended. False if the store does not answer in time: it may be down as well."""
        looking = self._looking = self._looking or asyncio.create_task(asyncio.to_thread(self._look))
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
