"""Finds a trajectory by an id or a part of one, in named runs or those in `runs/`, or in an ATIF file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import ConfigError, UserError
from etude.observe import RunDirectory
from etude.records import Trajectory, TrajectoryId

if TYPE_CHECKING:
    # Heavy at run time: pyarrow comes with it.
    from etude.controller.stored import Stored
    from etude.store import TrajectoryLog

ID_HELP = (
    "Session id, a unique part of one, or an ATIF file. Name the run before it; default: every run in runs/."
)
RUNS = Path("runs")
"""Default directory in which runs are searched."""
_MOST_SHOWN = 5
_MOST_COMPARED = 20_000


@dataclass(frozen=True, slots=True)
class Source:
    """A trajectory log, and the run of the model that it recorded, if known."""

    path: Path
    run: RunDirectory | None

    def open(self) -> TrajectoryLog:
        """The log, for reading."""
        from etude.store import TrajectoryLog

        return TrajectoryLog(self.path)


def find(words: Sequence[str], count: int) -> list[Stored]:
    """The `count` trajectories named by the last words; directories before these are the runs to search.

    Raises UserError for a name that fits none or more than one, RunDirectoryError, StoreError for damage.
    """
    named, names = list(words[: len(words) - count]), list(words[len(words) - count :])
    if len(names) < count or any(_is_source(Path(name)) for name in names):
        given = "runs only" if names else None
        raise ConfigError(
            f"expected {count} session id{'' if count == 1 else 's'}",
            field="ID",
            received=given,
            fix="`etude trajectory list RUN` shows the ids",
        )
    sources = [open_source(Path(path)) for path in named]
    return [_find_one(name, sources) for name in names]


def open_source(path: Path) -> Source:
    """Opens the directory of a run, of an evaluation, or of a log alone. Raises RunDirectoryError."""
    from etude.store.trajectories import find_log

    log = None if _is_run(path) else find_log(path)
    if log is None:
        return _open_run(path)
    return Source(log, _find_judged_run(path) if log != path else None)


def _open_run(path: Path) -> Source:
    run = RunDirectory.open(path)
    return Source(run.trajectories, run)


def _find_judged_run(evaluation: Path) -> RunDirectory | None:
    """The run whose policy was evaluated, if the target was a run that still exists."""
    plan = evaluation / "plan.json"
    place = Path(json.loads(plan.read_bytes())["target"]["place"]) if plan.is_file() else Path()
    return RunDirectory.open(place) if _is_run(place) else None


def _is_source(path: Path) -> bool:
    from etude.store.trajectories import find_log

    return _is_run(path) or find_log(path) is not None


def _is_run(path: Path) -> bool:
    return (path / "config.toml").is_file()


def _find_one(name: str, sources: Sequence[Source]) -> Stored:
    from etude.controller.stored import Stored

    if name.endswith(".json"):
        return Stored(_read_atif(Path(name)))
    chosen = list(sources) or _runs_at_hand()
    own = [source for source in chosen if source.run and name.startswith(f"{source.run.name}/")]
    pairs = [(source, row.id) for source in own or chosen for row in source.open().summaries()]
    source, identity = _choose(name, pairs)
    trajectory = source.open().find(identity)
    assert trajectory is not None, identity
    return Stored(trajectory, source.run)


def _runs_at_hand() -> list[Source]:
    paths = sorted(RUNS.glob("*/config.toml")) if RUNS.is_dir() else []
    if not paths:
        raise UserError(
            f"there is no run in {RUNS}/", field="RUN", fix="name the run directory before the id"
        )
    return [_open_run(path.parent) for path in paths]


def _read_atif(path: Path) -> Trajectory:
    from etude.store import parse_atif

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot be read: {error.strerror}", field="FILE", received=str(path), fix="name an ATIF file"
        ) from error
    return parse_atif(data, path.name)


def _choose(name: str, pairs: Sequence[tuple[Source, TrajectoryId]]) -> tuple[Source, TrajectoryId]:
    """The trajectory whose id equals, ends with, begins with or contains `name`. Raises UserError."""
    wanted = name.strip("/")
    ids = [(str(identity), (source, identity)) for source, identity in pairs]
    ways: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("have this id", lambda text: text == wanted),
        ("end with this", lambda text: text.endswith(f"/{wanted}")),
        ("begin with this", lambda text: text.startswith(wanted)),
        ("have this in their ids", lambda text: f"/{wanted}/" in text),
    )
    for how, fits in ways:
        found = [(text, pair) for text, pair in ids if wanted and fits(text)]
        if len(found) == 1:
            return found[0][1]
        if found:
            shown = ", ".join(text for text, _ in found[:_MOST_SHOWN])
            more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
            raise UserError(
                f"{len(found)} trajectories {how}",
                field="ID",
                received=name,
                fix=f"name one of them: {shown}{more}",
            )
    near = _nearest(wanted, [text for text, _ in ids])
    raise UserError(
        "no such trajectory",
        field="ID",
        received=name,
        fix=f"did you mean {near}?" if near else "`etude trajectory list RUN` shows the ids",
    )


def _nearest(wanted: str, ids: Iterable[str]) -> str | None:
    """The id whose ending, of as many parts, is most similar to `wanted`."""
    parts = wanted.count("/") + 1
    endings = {"/".join(text.split("/")[-parts:]): text for text in list(ids)[:_MOST_COMPARED]}
    found = difflib.get_close_matches(wanted, endings, 1, 0.5)
    return endings[found[0]] if found else None
