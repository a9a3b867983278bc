"""Tensors that several processes publish in parts: ranges of rows, each stored under its own name.

    trainer's rank 0   w[0:64/128]   ──┐
    trainer's rank 1   w[64:128/128] ──┴──> w, whole, in a subscriber's memory

A part is a tensor like any other to the codec and to the store. Only the manifest and the subscriber know
its whole tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from etude.errors import WeightUpdateError
from etude.records import TensorEntry
from etude.weights.manifest import join_digests, make_tensor

_NAME = re.compile(r"(.+)\[(\d+):(\d+)/(\d+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, stop) of the `total` rows of the tensor `name`."""

    name: str
    start: int
    stop: int
    total: int

    @property
    def stored_name(self) -> str:
        """Name of the part in a store: the tensor's own name if the part is the whole tensor."""
        if self.stop - self.start == self.total:
            return self.name
        return f"{self.name}[{self.start}:{self.stop}/{self.total}]"


def parse_part(stored_name: str) -> Part | None:
    """The reverse of `Part.stored_name`; None for a tensor that was stored whole."""
    found = _NAME.fullmatch(stored_name)
    return found and Part(found[1], int(found[2]), int(found[3]), int(found[4]))


def join_entries(entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Joins the entries of stored parts to entries of whole tensors, sorted by name.

    Raises WeightUpdateError if parts do not form a whole tensor, or a name occurs twice.
    """
    whole: dict[str, TensorEntry] = {}
    parts: dict[str, list[tuple[Part, TensorEntry]]] = {}
    for entry in entries:
        part = parse_part(entry.name)
        if part is not None:
            parts.setdefault(part.name, []).append((part, entry))
        elif entry.name in whole:
            raise WeightUpdateError("a tensor occurs twice", field="tensors", received=entry.name)
        else:
            whole[entry.name] = entry
    for name, own in parts.items():
        if name in whole:
            raise WeightUpdateError("a tensor occurs both whole and in parts", field="tensors", received=name)
        whole[name] = _join(name, sorted(own, key=lambda item: item[0].start))
    return tuple(entry for _, entry in sorted(whole.items()))


def _join(name: str, parts: list[tuple[Part, TensorEntry]]) -> TensorEntry:
    first, total = parts[0][1], parts[0][0].total
    at = 0
    for part, entry in parts:
        rows = part.stop - part.start
        fits = entry.shape == (rows, *first.shape[1:]) and entry.dtype == first.dtype
        if part.start != at or part.total != total or rows <= 0 or not fits:
            raise WeightUpdateError("parts of a tensor do not fit together", field=name, received=entry.name)
        at = part.stop
    if at != total:
        raise WeightUpdateError("a tensor's last part is missing", field=name, received=parts[-1][1].name)
    cuts = tuple(part.stop - part.start for part, _ in parts)
    digest = join_digests(entry.digest for _, entry in parts)
    return TensorEntry(name, (total, *first.shape[1:]), first.dtype, digest, cuts)


class TensorSet:
    """One version's tensors in host memory: as stored, and whole. Stored parts are views of whole tensors."""

    def __init__(self) -> None:
        self.stored: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}

    def allocate(self, entries: Iterable[TensorEntry], spare: TensorSet) -> dict[str, Tensor]:
        """Target tensors for decoding `entries`, by stored name: views of whole tensors for parts; for others
        the memory of `spare` where it fits, else none."""
        room: dict[str, Tensor] = {}
        for entry in entries:
            part = parse_part(entry.name)
            if part is not None:
                room[entry.name] = self._whole_of(part, entry, spare)[part.start : part.stop]
            elif entry.name in spare.stored:
                room[entry.name] = spare.stored[entry.name]
        return room

    def add(self, decoded: Mapping[str, Tensor]) -> None:
        """Adds decoded tensors, for parts those of `allocate`."""
        self.stored |= decoded
        self.whole |= {name: tensor for name, tensor in decoded.items() if parse_part(name) is None}

    def _whole_of(self, part: Part, entry: TensorEntry, spare: TensorSet) -> Tensor:
        if part.name not in self.whole:
            whole = replace(entry, name=part.name, shape=(part.total, *entry.shape[1:]))
            self.whole[part.name] = make_tensor(whole, spare.whole.get(part.name))
        return self.whole[part.name]
