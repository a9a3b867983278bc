"""Reads and writes safetensors files: one, or many with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from etude.errors import CheckpointError
from etude.kit.git import lfs_fix
from etude.model.huggingface.layout import Entry

_SINGLE = "model.safetensors"
_FETCH = "fetch it again"
_PICKLED = "pytorch_model*.bin"
_INDEX = "model.safetensors.index.json"
_SCALES = "_scale_inv"
_READABLE = (torch.float32, torch.bfloat16, torch.float16)


class Tensors(Protocol):
    """Named tensors of a checkpoint."""

    def names(self) -> set[str]:
        """Names of all tensors but auxiliary ones, such as scales."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def read(self, name: str) -> Tensor:
        """Reads a tensor. Raises CheckpointError if that fails."""
        ...


class GivenTensors:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class FileTensors:
    """Tensors in mapped files. 8-bit floats are read as float32, multiplied by their blocks' scales."""

    def __init__(self, handles: Mapping[str, Any], fp8_block: tuple[int, int] | None) -> None:
        """`handles`: the open file of each tensor, by name."""
        self._handles = handles
        self._fp8_block = fp8_block

    def names(self) -> set[str]:
        return {name for name in self._handles if not self._is_scale(name)}

    def _is_scale(self, name: str) -> bool:
        """Whether `name` holds the scales of another tensor that is stored in 8-bit floats."""
        scaled = name.removesuffix(_SCALES)
        if scaled == name or scaled not in self._handles:
            return False
        return self._handles[scaled].get_slice(scaled).get_dtype() == "F8_E4M3"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor = self._get(name)
        if tensor.dtype == torch.float8_e4m3fn and self._fp8_block is not None:
            return _scaled(name, tensor, self._get(name + _SCALES), self._fp8_block)
        if tensor.dtype not in _READABLE:
            raise CheckpointError(
                "has a type that cannot be read",
                field=name,
                received=str(tensor.dtype),
                fix="use float32, bfloat16, float16, or 8-bit floats with quantization_config",
            )
        return tensor

    def _get(self, name: str) -> Tensor:
        if name not in self._handles:
            raise CheckpointError("is missing", field=name, fix="fetch the checkpoint again")
        try:
            return self._handles[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot be read: {error}", field=name, fix="fetch it again") from error


@contextmanager
def open_tensors(directory: Path, fp8_block: tuple[int, int] | None) -> Iterator[FileTensors]:
    """Maps the files of a checkpoint. Raises CheckpointError if one is missing, damaged or not as indexed."""
    with ExitStack() as stack:
        if (directory / _SINGLE).exists() or not (directory / _INDEX).exists():
            handle = _open(stack, directory / _SINGLE)
            yield FileTensors(dict.fromkeys(handle.keys(), handle), fp8_block)
            return
        weight_map = _read_index(directory / _INDEX)
        files = {name: _open(stack, directory / name) for name in sorted(set(weight_map.values()))}
        file_of = {tensor: file for file, handle in files.items() for tensor in handle.keys()}  # noqa: SIM118
        for tensor, file in weight_map.items():
            if file_of.get(tensor) != file:
                raise CheckpointError(
                    "is not in the file that the index names",
                    field=tensor,
                    received=file,
                    fix="fetch the checkpoint again: its files are of different versions",
                )
        yield FileTensors({tensor: files[file] for tensor, file in file_of.items()}, fp8_block)


def write_tensors(directory: Path, tensors: Mapping[str, Entry], max_file_bytes: int) -> None:
    """Writes files of at most `max_file_bytes` each (one tensor at least), and an index if there are many.
    Earlier weight files in the directory are removed."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, entry in tensors.items():
        if shards[-1] and size + entry.num_bytes > max_file_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += entry.num_bytes
    total = len(shards)
    written = [f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    if total == 1:
        written = [_SINGLE]
    for file, names in zip(written, shards, strict=True):
        save_file({name: tensors[name].read() for name in names}, directory / file, metadata={"format": "pt"})
    if total > 1:
        weight_map = {name: file for file, names in zip(written, shards, strict=True) for name in names}
        size = sum(entry.num_bytes for entry in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        written.append(_INDEX)
    for path in directory.glob("model*.safetensors*"):
        if path.name not in written:
            path.unlink()


def _open(stack: ExitStack, path: Path) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot be read: {error}", field=path.name, received=str(path), fix=_fix_for(path)
        ) from error


def _fix_for(path: Path) -> str:
    """The error's fix for a weight file that is missing or damaged."""
    if path.is_file():
        return lfs_fix(path) or _FETCH
    if any(path.parent.glob(_PICKLED)):
        return f"convert {_PICKLED} with transformers: from_pretrained, then save_pretrained"
    return _FETCH


def _read_index(path: Path) -> dict[str, str]:
    """Tensor -> file name. Raises CheckpointError; a file outside the directory is refused."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        items = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"cannot be read: {error}", field=path.name, received=str(path), fix="fetch it again"
        ) from error
    for tensor, file in items.items():
        if Path(file).name != file:
            raise CheckpointError(
                "must be a file of this directory", field=f"{path.name}: {tensor}", received=file
            )
    return items


def _scaled(name: str, weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """weight [n, m] in 8-bit floats times scales [ceil(n / rows), ceil(m / columns)] -> float32."""
    expected = tuple(-(-size // edge) for size, edge in zip(weight.shape, block, strict=False))
    if weight.ndim != 2 or tuple(scales.shape) != expected:
        raise CheckpointError(
            f"must have shape {expected}, one scale per block of {block}",
            field=name + _SCALES,
            received=tuple(scales.shape),
        )
    spread = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]
