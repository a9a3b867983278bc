"""One part of the trajectory log as a Parquet file: a row per trajectory, token arrays as nested lists.

`record` has everything but the arrays as JSON, and trajectories are read from it. The index columns repeat
some of it, so that any Parquet reader can filter and plot without knowing our records. The groups are in the
file's key-value metadata, under `etude.groups`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from etude.records import Group, Segment, Status, Trajectory, TrajectoryId
from etude.store.documents import (
    dump_json,
    group_document,
    group_from_document,
    trajectory_document,
    trajectory_from_document,
)

GROUPS_KEY = b"etude.groups"
FORMAT_KEY = b"etude.format"
FORMAT = b"1"

INDEX_TYPES: dict[str, pa.DataType] = {
    "group_number": pa.int32(),
    "run": pa.string(),
    "task": pa.string(),
    "epoch": pa.int64(),
    "group": pa.int64(),
    "index": pa.int64(),
    "status": pa.string(),
    "reward": pa.float64(),
    "oldest_step": pa.int64(),
    "num_turns": pa.int32(),
    "num_sampled_tokens": pa.int32(),
}
ARRAY_TYPES: dict[str, type[np.generic]] = {"tokens": np.int32, "sampled": np.bool_, "logprobs": np.float32}


@dataclass(frozen=True, slots=True)
class IndexRow:
    """The index columns of one trajectory in a part, read without decoding any token."""

    group_number: int
    """Position of the trajectory's group within the part."""
    run: str
    task: str
    epoch: int
    group: int
    index: int
    status: Status
    reward: float | None
    """The total reward; None if it has none."""
    oldest_step: int | None
    """Step of the oldest policy version that sampled any token; None if nothing was sampled."""
    num_turns: int
    num_sampled_tokens: int

    @property
    def id(self) -> TrajectoryId:
        """The trajectory's id."""
        return TrajectoryId(self.run, self.task, self.epoch, self.group, self.index)


def stored_id(identity: TrajectoryId) -> TrajectoryId:
    """The id in the form in which index rows store it."""
    return replace(identity, run=_readable(identity.run), task=_readable(identity.task))


def index_row(number: int, trajectory: Trajectory) -> IndexRow:
    """The index row of a trajectory in the `number`-th group of a part."""
    identity, oldest = stored_id(trajectory.id), trajectory.oldest_version
    return IndexRow(
        group_number=number,
        run=identity.run,
        task=identity.task,
        epoch=identity.epoch,
        group=identity.group,
        index=identity.index,
        status=trajectory.status,
        reward=trajectory.reward.total if trajectory.reward else None,
        oldest_step=oldest.step if oldest else None,
        num_turns=len(trajectory.turns),
        num_sampled_tokens=trajectory.num_sampled_tokens,
    )


def encode_part(groups: Sequence[Group]) -> bytes:
    """The groups as the bytes of a Parquet file (zstd).

    Raises StoreError where facts, timings or tool facts are not plain JSON values.
    """
    rows = [index_row(number, member) for number, group in enumerate(groups) for member in group.members]
    members = [member for group in groups for member in group.members]
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(row, name) for row in rows], type=kind) for name, kind in INDEX_TYPES.items()
    }
    records = [dump_json(trajectory_document(member), str(member.id)) for member in members]
    columns["record"] = pa.array(records, type=pa.string())
    for name, kind in ARRAY_TYPES.items():
        columns[name] = _nested_array([member.segments for member in members], name, kind)
    metadata = {
        FORMAT_KEY: FORMAT,
        GROUPS_KEY: dump_json([group_document(group) for group in groups], "groups"),
    }
    table = pa.Table.from_pydict(columns, metadata=metadata)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=1)
    return sink.getvalue().to_pybytes()


def decode_index(data: bytes) -> list[IndexRow]:
    """The index rows of a part. Raises what pyarrow raises on damaged bytes."""
    table = pq.read_table(pa.BufferReader(data), columns=list(INDEX_TYPES), use_threads=False)
    columns: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in INDEX_TYPES}
    columns["status"] = [Status(name) for name in columns["status"]]
    return [IndexRow(*row) for row in zip(*columns.values(), strict=True)]


def decode_part(data: bytes, wanted: Callable[[IndexRow], bool] | None = None) -> list[Group]:
    """The groups of a part; with `wanted`, only the members for which it is true, and no empty groups.

    Raises what pyarrow, json and the records raise on damaged bytes.
    """
    table = pq.read_table(pa.BufferReader(data), use_threads=False)
    metadata = table.schema.metadata or {}
    if metadata.get(FORMAT_KEY) != FORMAT:
        raise ValueError(f"not a part of format {FORMAT.decode()}")
    documents = json.loads(metadata[GROUPS_KEY])
    records = table.column("record").to_pylist()
    nested = {name: _NestedColumn(table.column(name)) for name in ARRAY_TYPES}
    members: list[list[Trajectory]] = [[] for _ in documents]
    for position, row in enumerate(decode_index(data)):
        if wanted is None or wanted(row):
            arrays = list(zip(*(nested[name].row(position) for name in ARRAY_TYPES), strict=True))
            members[row.group_number].append(trajectory_from_document(json.loads(records[position]), arrays))
    pairs = zip(documents, members, strict=True)
    return [group_from_document(document, found) for document, found in pairs if found or wanted is None]


class _NestedColumn:
    """A column of type list<list<value>>: rows of trajectories, each with one array per segment."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        outer = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        inner = outer.values
        self._rows = outer.offsets.to_numpy()
        self._segments = inner.offsets.to_numpy()
        # A copy: writable for the trainer, and no longer tied to the file's buffer.
        self._values: NDArray[Any] = np.array(inner.values.to_numpy(zero_copy_only=False))

    def row(self, position: int) -> list[NDArray[Any]]:
        """The arrays of one trajectory's segments."""
        segments = range(self._rows[position], self._rows[position + 1])
        return [self._values[self._segments[at] : self._segments[at + 1]] for at in segments]


def _nested_array(rows: Sequence[Sequence[Segment]], name: str, kind: type[np.generic]) -> pa.Array:
    """list<list<kind>> from the named array of each segment of each row."""
    arrays = [getattr(segment, name) for segments in rows for segment in segments]
    values = np.concatenate([np.zeros(0, kind), *arrays]).astype(kind, copy=False)
    inner = pa.ListArray.from_arrays(_offsets([len(array) for array in arrays]), pa.array(values))
    return pa.ListArray.from_arrays(_offsets([len(segments) for segments in rows]), inner)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))


def _readable(text: str) -> str:
    """Text that Parquet can store: lone surrogates, which UTF-8 cannot encode, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
