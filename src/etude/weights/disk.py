"""Tensors in a temporary file instead of memory, read one at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import StoreError
from etude.weights.manifest import bytes_of


class DiskTensors(Mapping[str, Tensor]):
    """Tensors in an unlinked temporary file, which is freed with this object or the process."""

    def __init__(self, directory: Path) -> None:
        """Raises StoreError if `directory` cannot be written."""
        self._directory = directory
        self._places: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        self._end = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (it goes with this object)
        except OSError as error:
            raise self._failed("written", error) from error

    def add(self, name: str, tensor: Tensor) -> None:
        """Appends a CPU tensor. Raises StoreError."""
        try:
            self._file.write(bytes_of(tensor).data)
            self._file.flush()
        except OSError as error:
            raise self._failed("written", error) from error
        self._places[name] = (self._end, tensor.shape, tensor.dtype)
        self._end += tensor.nbytes

    def num_bytes(self, name: str) -> int:
        """Size of a tensor, without reading it."""
        _, shape, dtype = self._places[name]
        return shape.numel() * dtype.itemsize

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor into new memory. Raises StoreError."""
        start, shape, dtype = self._places[name]
        tensor = torch.empty(shape, dtype=dtype)
        room, done = bytes_of(tensor).data, 0
        while done < len(room):
            try:
                count = os.preadv(self._file.fileno(), [room[done:]], start + done)
            except OSError as error:
                raise self._failed("read", error) from error
            if not count:
                raise self._failed("read", OSError("the file is too short"))
            done += count
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places  # else the tensor would be read

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _failed(self, done: str, error: OSError) -> StoreError:
        return StoreError(
            f"cannot be {done}: {error.strerror or error}",
            field="weights.scratch",
            received=str(self._directory),
            fix="name a directory on a local disk with space for two versions of a rank's tensors",
        )


class TensorSubset(Mapping[str, Tensor]):
    """A view of some entries of another mapping, which is read lazily."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        self._tensors = tensors
        self._names = dict.fromkeys(name for name in names if name in tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
