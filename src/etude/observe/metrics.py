"""Metric sinks: one row per step and kind, in order."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from etude.errors import RunDirectoryError
from etude.kit.durable import sync_file, warn_if_full

MetricRow = dict[str, Any]
"""One row: `kind`, `step`, `wall_s` and the values; text is a label (`split`, `mode`, `name`), NaN or inf."""

LABELS = ("split", "mode", "name")
"""Values that identify a row, together with its kind and step."""


class MetricSink(Protocol):
    """Receives rows of metrics."""

    def write(self, kind: str, step: int, values: Mapping[str, float | str]) -> None:
        """Writes one row. `kind` is the stage (`midtrain`, `rl`, `evaluation`), `step` its step."""
        ...

    def close(self) -> None:
        """Flushes and releases its resources. Idempotent."""
        ...


class MemorySink:
    """Keeps rows in a list: for tests and short-lived readers."""

    def __init__(self) -> None:
        self.rows: list[MetricRow] = []

    def write(self, kind: str, step: int, values: Mapping[str, float | str]) -> None:
        """Appends the row."""
        self.rows.append({"kind": kind, "step": step, **_plain(values)})

    def close(self) -> None:
        """Does nothing."""


class JsonlSink:
    """Appends one JSON line per row and flushes it, so that a killed run loses at most a half-written row.

    `wall_s` is added: seconds since the run's first start. A reopened file continues from its last
    whole line, and a half-written last line is cut off. A value named `wall_s` is kept as given.

    On a full disk a few kilobytes of rows wait in memory, and further ones are lost, with a warning: missing
    metrics do not end a run.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = path.open("a+b")
        self._begun = clock() - self._recover()

    def write(self, kind: str, step: int, values: Mapping[str, float | str]) -> None:
        """Appends the row and flushes it to the operating system."""
        wall_s = round(self._clock() - self._begun, 3)
        row = {"kind": kind, "step": step, "wall_s": wall_s, **_plain(values)}
        with warn_if_full("a row of metrics is"):
            self._file.write(json.dumps(row).encode("utf-8") + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Makes the rows durable and closes the file. Idempotent."""
        if not self._file.closed:
            with warn_if_full("the last rows of metrics are"), self._file:
                sync_file(self._file)

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recover(self) -> float:
        """Cuts a half-written line off the end; returns the latest wall time of the rows."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        self._file.seek(0, os.SEEK_END)
        return max((float(row.get("wall_s", 0.0)) for row in _rows(whole)), default=0.0)


def read_metrics(path: Path) -> list[MetricRow]:
    """All complete rows of a `metrics.jsonl`, in order; none if the file does not exist yet.

    A resumed run repeats the steps since its checkpoint: of rows with the same kind, step and labels only the
    last one is returned.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    latest: dict[tuple[Any, ...], MetricRow] = {}
    for row in _rows(data[: data.rfind(b"\n") + 1]):
        key = (row.get("kind"), row.get("step"), *(row.get(label) for label in LABELS))
        latest.pop(key, None)
        latest[key] = row
    return list(latest.values())


def _rows(data: bytes) -> list[MetricRow]:
    rows: list[MetricRow] = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise RunDirectoryError(
                f"line {number} is not a row of metrics",
                field="metrics.jsonl",
                received=line[:80].decode("utf-8", "replace"),
                fix="remove that line",
            )
        rows.append(row)
    return rows


def _plain(values: Mapping[str, float | str]) -> dict[str, float | str]:
    """Values that JSON can represent: numbers of any library become floats, NaN and infinities text."""
    plain: dict[str, float | str] = {}
    for name, value in values.items():
        if isinstance(value, str | int):
            plain[name] = value
        else:
            number = float(value)
            plain[name] = number if math.isfinite(number) else str(number)
    return plain
