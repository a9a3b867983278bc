"""Recorded sessions as load: lengths and tokens of stored trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.load.workload import LoadSession, LoadTurn
from numpy.typing import NDArray

from etude.errors import UserError
from etude.records import Segment, Trajectory
from etude.store import TrajectoryLog, parse_atif
from etude.store.trajectories import find_log


def recorded_sessions(path: Path, limit: int | None = None) -> list[LoadSession]:
    """The sessions of a run, of a trajectory log (a directory of parts), of a directory of ATIF files, or of
    one ATIF file.

    Each segment is a session of its own, as the engine saw it. Raises UserError if none has token ids,
    StoreError for damaged files.
    """
    sessions: list[LoadSession] = []
    for trajectory in _trajectories(path):
        for segment in trajectory.segments:
            session = session_of(segment, _pause_s(trajectory))
            if session is not None:
                # Segments of different files may have the same name.
                sessions.append(replace(session, id=f"{len(sessions)}-{session.id}"))
            if limit is not None and len(sessions) >= limit:
                return sessions
    if not sessions:
        raise UserError(
            "holds no session with token ids",
            field="recorded",
            received=str(path),
            fix="name a run, its trajectories, or ATIF files with token ids",
        )
    return sessions


def session_of(segment: Segment, tool_s: float = 0.0) -> LoadSession | None:
    """One segment as load: alternating inputs and sampled answers. None if nothing was sampled."""
    sampled = np.asarray(segment.sampled, dtype=np.bool_)
    edges = np.flatnonzero(np.diff(sampled.astype(np.int8), prepend=0, append=0))
    turns: list[LoadTurn] = []
    inputs: list[NDArray[np.int32]] = []
    outputs: list[NDArray[np.int32]] = []
    before = 0
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        given = segment.tokens[before:start]
        if len(given):
            turns.append(LoadTurn(len(given), end - start, tool_s))
            inputs.append(np.asarray(given, dtype=np.int32))
            outputs.append(np.asarray(segment.tokens[start:end], dtype=np.int32))
        before = end
    return LoadSession(segment.id, tuple(turns), tuple(inputs), tuple(outputs)) if turns else None


def _trajectories(path: Path) -> Iterator[Trajectory]:
    if path.is_file():
        yield parse_atif(path.read_bytes(), path.name)
        return
    if not path.is_dir():
        raise UserError("is not there", field="recorded", received=str(path), fix="name a file or directory")
    if (log := find_log(path)) is not None:
        for group in TrajectoryLog(log).read():
            yield from group.members
    elif not (path / "config.toml").is_file():  # a run's JSON files are not sessions
        for file in sorted(path.glob("*.json")):
            yield parse_atif(file.read_bytes(), file.name)


def _pause_s(trajectory: Trajectory) -> float:
    """Mean tool time after a turn."""
    num_turns = max(1, len(trajectory.turns))
    return float(trajectory.timings.get("tools", 0.0)) / num_turns
