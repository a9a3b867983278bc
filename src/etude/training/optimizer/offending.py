"""Stored batches whose gradient was not finite, for diagnosis."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from etude.kit.durable import write_bytes


class OffendingBatches:
    """A directory with the newest few of these batches. Files are written atomically."""

    def __init__(self, directory: Path, keep: int = 4, rank: int = 0) -> None:
        """`keep`: files per rank; the oldest are deleted."""
        self._directory = directory
        self._keep = keep
        self._rank = rank

    def save(self, step: int, norm: float, batch: Mapping[str, Any]) -> Path | None:
        """Writes `batch` (tensors and plain values, for `torch.load(..., weights_only=True)`) with the
        gradient's norm; returns the path. None if `keep` is 0, or, with a warning, if writing fails: a full
        disk does not end the run."""
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
            warnings.warn(f"the batch of a skipped update cannot be stored: {error}", stacklevel=2)
            return None
        return path

    def kept(self) -> list[Path]:
        """This rank's files, oldest first."""
        return sorted(self._directory.glob(f"step-*-rank-{self._rank}.pt"))
