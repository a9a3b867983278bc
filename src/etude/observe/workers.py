"""How many rollout workers a run is to have and has, in two files of its directory.

`workers.json` is the run's: what there is. `workers-wanted.json` is written to ask for another number; the
run reads it while it goes on, and forgets it when it ends or begins again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from etude.errors import RunDirectoryError
from etude.kit.durable import read_record, write_json
from etude.observe.run_directory import RunDirectory

WantedWorkers = int | Literal["auto"]
"""A number, or what the configuration says."""


class WorkerFiles:
    """The two files of a run."""

    def __init__(self, directory: Path) -> None:
        self._standing = directory / "workers.json"
        self._wanted = directory / "workers-wanted.json"

    def begin(self) -> None:
        """The run begins, as its configuration says."""
        self._wanted.unlink(missing_ok=True)

    def tell(self, standing: Mapping[str, Any]) -> None:
        """The run says what there is."""
        write_json(self._standing, dict(standing))

    def end(self) -> None:
        """The run ends."""
        self._standing.unlink(missing_ok=True)
        self._wanted.unlink(missing_ok=True)

    def wanted(self) -> WantedWorkers:
        """What is asked for; a file that cannot be read asks for nothing."""
        found = read_record(self._wanted).get("wanted")
        return found if type(found) is int and found >= 1 else "auto"

    def ask(self, wanted: WantedWorkers) -> None:
        """Asks the run for so many. Raises RunDirectoryError as `standing`, and for less than one."""
        self.standing()
        if wanted != "auto" and wanted < 1:
            raise RunDirectoryError(
                "a run that began with rollout workers keeps one at least",
                field="workers",
                received=wanted,
                fix="ask for 1 or more, or for auto: as cluster.workers and cluster.most_workers say",
            )
        write_json(self._wanted, {"wanted": wanted})

    def standing(self) -> dict[str, Any]:
        """What there is, as the run last said. Raises RunDirectoryError where no run with workers goes on."""
        run = RunDirectory(self._standing.parent)
        found = run.read_json(self._standing)
        if found is None:
            raise RunDirectoryError(
                "no run with rollout workers goes on here",
                field="run",
                received=str(run.path),
                fix='name one with executor = "ray" and cluster.workers of 1 or more, while it goes on',
            )
        return found
