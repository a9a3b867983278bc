"""The status of a run's rollout workers, and a request for another number of them, as files of its directory.

The run writes its status to `workers.json`. Another process writes the requested number to
`workers-wanted.json`; the run reads it while it is running, and deletes it when it ends or begins again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from etude.errors import RunDirectoryError
from etude.kit.durable import read_record, write_json
from etude.observe.run_directory import RunDirectory

WantedWorkers = int | Literal["auto"]
"""A number, or `auto`: as configured."""


class WorkerFiles:
    """Reads and writes the two files of a run."""

    def __init__(self, directory: Path) -> None:
        self._status = directory / "workers.json"
        self._request = directory / "workers-wanted.json"

    def clear_request(self) -> None:
        """Deletes an earlier request when the run begins."""
        self._request.unlink(missing_ok=True)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Called by the run when its workers change."""
        write_json(self._status, dict(status))

    def remove(self) -> None:
        """Deletes both files when the run ends."""
        self._status.unlink(missing_ok=True)
        self._request.unlink(missing_ok=True)

    def read_request(self) -> WantedWorkers:
        """The requested number; `auto` without a readable request."""
        found = read_record(self._request).get("wanted")
        return found if type(found) is int and found >= 1 else "auto"

    def write_request(self, wanted: WantedWorkers) -> None:
        """Requests a number of workers. Raises RunDirectoryError as `read_status`, and for less than one."""
        self.read_status()
        if wanted != "auto" and wanted < 1:
            raise RunDirectoryError(
                "a run that started with rollout workers needs at least one",
                field="workers",
                received=wanted,
                fix="give 1 or more, or auto for cluster.workers and cluster.most_workers",
            )
        write_json(self._request, {"wanted": wanted})

    def read_status(self) -> dict[str, Any]:
        """The last status that the run wrote. Raises RunDirectoryError if no run with workers is running."""
        run = RunDirectory(self._status.parent)
        found = run.read_json(self._status)
        if found is None:
            raise RunDirectoryError(
                "no run with rollout workers is in progress here",
                field="run",
                received=str(run.path),
                fix='name one in progress, with executor = "ray" and cluster.workers of 1 or more',
            )
        return found
