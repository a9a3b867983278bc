"""Batches whose gradient was not finite, kept for a diagnosis."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from etude.kit.durable import write_bytes


class OffendingBatches:
    """Writes batches to a directory, the newest few. A file is there when it is whole."""

    def __init__(self, directory: Path, keep: int = 4, rank: int = 0) -> None:
        """`keep`: files per rank; the oldest goes first."""
        self._directory = directory
        self._keep = keep
        self._rank = rank

    def save(self, step: int, norm: float, batch: Mapping[str, Any]) -> Path | None:
        """Keeps `batch` (tensors and plain values, for `torch.load(..., weights_only=True)`) with the
        gradient's norm; returns where. None where nothing is to be kept, or where nothing can be: a disk
        that is full costs the diagnosis, with a warning, and not the run."""
        if self._keep < 1:
            return None
        path = self._directory / f"step-{step:07d}-rank-{self._rank}.pt"
        data = io.BytesIO()
        torch.save({"step": step, "grad_norm": norm, **batch}, data)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_bytes(path, data.getvalue())
            for old in self.kept()[: -self._keep]:
                old.unlink()
        except OSError as error:
            warnings.warn(f"the batch of a skipped update is not kept: {error}", stacklevel=2)
            return None
        return path

    def kept(self) -> list[Path]:
        """This rank's files, oldest first."""
        return sorted(self._directory.glob(f"step-*-rank-{self._rank}.pt"))
