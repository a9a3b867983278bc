"""The mark in a weight store that its run is over: for readers that come when nobody answers for the run.

over/run.json     there from the end of a run's reinforcement learning until the next one on this store
"""

from __future__ import annotations

import json

from etude.errors import StoreError
from etude.weights.folders import Folder, MissingError

_MARK = "over/run.json"


def mark_over(folder: Folder, run: str) -> None:
    """The run of this name is over. Raises StoreError."""
    folder.write(_MARK, json.dumps({"run": run}).encode())


def clear_over(folder: Folder) -> None:
    """A run begins, or goes on. Raises StoreError."""
    folder.delete(_MARK)


def read_over(folder: Folder) -> str | None:
    """The name of the run that is over; None while one goes on, or none has begun. Raises StoreError."""
    try:
        data = folder.read(_MARK)
    except MissingError:
        return None
    try:
        return str(json.loads(data)["run"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError("is no mark of a run's end", field=_MARK, received=folder.url) from error
