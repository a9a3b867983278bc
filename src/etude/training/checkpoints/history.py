"""Earlier checkpoints: retention, and the choice of the one that a run resumes from.

    checkpoints/latest                 the newest
    checkpoints/history/000012-rl-30   the one before: its number, its stage, its step
    checkpoints/damaged/latest         found damaged when a run resumed from an older one, or saved a new one

Only complete checkpoints are moved into the history, by a rename; the newest is never deleted.
"""

from __future__ import annotations

import errno
import math
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from etude.config import CheckpointConfig
from etude.errors import CheckpointError
from etude.kit.durable import move, recover_directory, retired_path
from etude.observe import MetricSink, Observer
from etude.training.checkpoints.files import FileFlaw, Flaw, find_flaws, partial_of
from etude.training.checkpoints.saving import read_state

HISTORY, DAMAGED = "history", "damaged"
KIND = "resume"
"""Kind of the metrics row written when a resuming run skips unusable checkpoints."""
_NAME = re.compile(r"(\d+)-(.+)-(\d+)")


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """An earlier checkpoint."""

    path: Path
    number: int
    """Increases with every save."""
    step: int

    def score(self) -> float | None:
        """The score it was saved with; higher is better. None if it has none, if the score is not finite and
        so cannot be ranked, or if its state cannot be read any more."""
        try:
            score = (read_state(self.path) or {}).get("score")
        except CheckpointError:
            return None
        return None if score is None or not math.isfinite(score) else float(score)


class History:
    """The directory of earlier checkpoints. One process changes it at a time."""

    def __init__(self, latest: Path) -> None:
        """`latest`: path of the newest checkpoint."""
        self._directory = latest.with_name(HISTORY)
        self._damaged = latest.with_name(DAMAGED) / latest.name

    def entries(self) -> list[HistoryEntry]:
        """All entries, oldest first."""
        if not self._directory.is_dir():
            return []
        named = [(path, _NAME.fullmatch(path.name)) for path in self._directory.iterdir()]
        found = [HistoryEntry(path, int(match[1]), int(match[3])) for path, match in named if match]
        return sorted(found, key=lambda entry: entry.number)

    def add(self, directory: Path) -> None:
        """Moves a checkpoint into the history. One without a state, from which no run can resume, is
        deleted; one whose state cannot be read is moved to `damaged`."""
        try:
            state = read_state(directory)
        except CheckpointError:
            _quarantine(directory, self._damaged)
            return
        if state is None:
            shutil.rmtree(directory)
            return
        entries = self.entries()
        number = entries[-1].number + 1 if entries else 1
        self._directory.mkdir(exist_ok=True)
        name = f"{number:06d}-{state.get('stage', 'training')}-{int(state.get('step', 0))}"
        move(directory, self._directory / name)

    def prune(self, settings: CheckpointConfig) -> None:
        """Deletes entries that no rule keeps. The newest checkpoint, not an entry, counts for `keep_last`."""
        entries = self.entries()
        keep = entries[max(0, len(entries) + 1 - settings.keep_last) :]
        if settings.keep_every_steps:
            keep += [entry for entry in entries if entry.step % settings.keep_every_steps == 0]
        if settings.keep_best:
            scored = [(score, entry) for entry in entries if (score := entry.score()) is not None]
            scored.sort(key=lambda pair: (pair[0], pair[1].number))
            keep += [entry for _, entry in scored[-settings.keep_best :]]
        wanted = {entry.path for entry in keep}
        for entry in entries:
            if entry.path not in wanted:
                _delete(entry.path)


def find_resumable(latest: Path, metrics: MetricSink, observer: Observer) -> Path | None:
    """The newest intact checkpoint: `latest`, the one it replaced if the save was killed, or one of the
    history; None if nothing was saved yet.

    Reads it completely. Skipped ones are printed, counted by reason in the metrics, and moved to `damaged`.
    Raises CheckpointError if there are some and none is intact: starting over would discard their contents.
    """
    recover_directory(latest)
    replaced = retired_path(latest)
    candidates = [path for path in (latest, replaced) if path.exists()]
    candidates += [entry.path for entry in reversed(History(latest).entries())]
    flaws: list[FileFlaw] = []
    damaged: list[Path] = []
    found: Path | None = None
    for candidate in candidates:
        wrong = find_flaws(candidate)
        if not wrong:
            found = candidate
            break
        flaws.append(wrong[0])
        damaged.append(candidate)
    if flaws and found is None:
        first = flaws[0].error()
        raise CheckpointError(
            f"{first.message}, like each of the {len(candidates)} checkpoints"
            if len(candidates) > 1
            else f"{first.message}, and there is no other",
            field=first.field,
            received=first.received,
            fix=f"restore one from a backup, or move {latest.parent} away to start again",
        )
    if partial_of(latest).exists():
        flaws.append(FileFlaw(partial_of(latest), Flaw.UNFINISHED))
    if flaws:
        _report(flaws, found, metrics, observer)
    for path in damaged:
        _quarantine(path, latest.with_name(DAMAGED) / path.name)
    if found == replaced:
        recover_directory(latest)
        return latest
    return found


def _report(flaws: list[FileFlaw], found: Path | None, metrics: MetricSink, observer: Observer) -> None:
    for flaw in flaws:
        observer.say(f"skipping a checkpoint that is {flaw.flaw}: {flaw.file}")
    counts = Counter(f"skipped_{flaw.flaw}" for flaw in flaws)
    state = read_state(found) if found is not None else None
    step = int((state or {}).get("step", 0))
    metrics.write(KIND, step, {reason: float(number) for reason, number in counts.items()})


def _delete(path: Path) -> None:
    """Deletes a directory. Placeholders that a network file system keeps for open files, such as the state
    that the run resumed from, remain until the next save."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise


def _quarantine(path: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    move(path, target)
