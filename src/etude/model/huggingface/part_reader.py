"""Reads only some rows of a model's parameters from a Hugging Face directory.

Of a model that is sharded over ranks, each rank reads its own part: a run of rows of each parameter. Our
parameters combine several of theirs (queries, keys and values; one matrix per expert), so these rows may be
in one of their tensors, in a part of one, or in many.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from etude.kit.memory import return_free_memory
from etude.model.huggingface.checkpoint import HEAD, check_names, check_tied, finite, outline_model
from etude.model.huggingface.fields import read_fields
from etude.model.huggingface.files import FileTensors, open_tensors
from etude.model.huggingface.layout import entries
from etude.model.language_model import LanguageModel

_MAPPED_BYTES = 1 << 24
"""Pages of a mapped file count as this process' memory until it is closed: it is reopened after this many
bytes."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A Hugging Face tensor within one of our parameters."""

    name: str
    select: Callable[[Tensor], Tensor] | None
    """Selects the view of theirs; None: all of it, with rows as in ours."""
    view: Tensor
    """The view of ours, without storage."""
    start: int
    stop: int
    """The range of our rows that it overlaps."""


class PartReader:
    """An open checkpoint. A context manager."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        """Checks names and shapes of all tensors. Raises CheckpointError as `load_model` does."""
        self._directory = directory
        self._fields = read_fields(directory / "config.json")
        self.outline: LanguageModel = outline_model(self._fields, dtype)
        """The model, without storage."""
        self._parameters = {name: p.data for name, p in self.outline.named_parameters()}
        owners = {_storage(p): name for name, p in self._parameters.items()}
        self._pieces: dict[str, list[_Piece]] = {name: [] for name in self._parameters}
        found = entries(self.outline)
        for name, entry in found.items():
            for select, view in entry.parts:
                owner = owners[_storage(view)]
                is_same = len(entry.parts) == 1 and view.shape[1:] == self._parameters[owner].shape[1:]
                piece = _piece(name, None if is_same else select, view, self._parameters[owner])
                self._pieces[owner].append(piece)
        self._stack = ExitStack()
        self._tensors = self._open()
        num_layers = self.outline.config.num_layers
        check_names(found, self._tensors, num_layers, self._fields.num_mtp_layers)
        self._has_spare_head = self.outline.output_embedding is None and HEAD in self._tensors.names()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        return_free_memory()

    @torch.no_grad()
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of our parameter `name`, in its type. Raises CheckpointError for values that are
        not finite, and for a stored head that differs from the embedding to which it is tied."""
        whole = self._parameters[name]
        pieces = [p for p in self._pieces[name] if p.start < stop and start < p.stop]
        if any(p.select is not None and not (start <= p.start and p.stop <= stop) for p in pieces):
            return self.read(name, 0, len(whole))[start:stop]  # theirs are not runs of our rows
        rows = torch.empty((stop - start, *whole.shape[1:]), dtype=whole.dtype)
        for piece in pieces:
            if piece.select is None:
                end = min(stop, piece.stop)
                step = max(1, _MAPPED_BYTES // max(1, whole[0].nbytes))
                for first in range(max(start, piece.start), end, step):
                    target = rows[first - start : min(first + step, end) - start]
                    at = first - piece.start
                    target.copy_(self._read(piece.name, at, at + len(target)))
            else:
                offset = piece.view.storage_offset() - start * whole.stride(0)
                target = rows.as_strided(piece.view.size(), piece.view.stride(), offset)
                target.copy_(piece.select(self._read(piece.name).contiguous()))
        if name == "embedding" and self._has_spare_head:
            check_tied(self._read(HEAD, start, stop), rows)
        return rows

    def _read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if self._num_mapped > _MAPPED_BYTES:
            self._stack.close()
            return_free_memory()
            self._tensors = self._open()
        tensor = self._tensors.read(name)[start:stop]  # of a mapped file: only these rows are read
        self._num_mapped += tensor.nbytes
        return finite(name, tensor)

    def _open(self) -> FileTensors:
        self._num_mapped = 0
        return self._stack.enter_context(open_tensors(self._directory, self._fields.fp8_block))


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's storage, also for tensors without memory."""
    return tensor.untyped_storage()._cdata


def _piece(name: str, select: Callable[[Tensor], Tensor] | None, view: Tensor, whole: Tensor) -> _Piece:
    stride = whole.stride(0)
    first = int(view.storage_offset())
    last: int = first + sum((size - 1) * step for size, step in zip(view.size(), view.stride(), strict=True))
    return _Piece(name, select, view, first // stride, last // stride + 1)
