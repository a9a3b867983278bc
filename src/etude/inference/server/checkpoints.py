"""Weights of a server by manifest URL: the initial ones in memory, or those of a checkpoint directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from etude.config import ModelConfig
from etude.errors import CheckpointError, WeightUpdateError
from etude.model.huggingface import load_model
from etude.records import PolicyVersion, WeightManifest
from etude.weights import MemoryWeights, check_tensors, describe_tensors

_FILE, _MEMORY = "file:", "memory:"


class CheckpointWeights:
    """Fetches weights for an `EngineService`: `memory:` and `file:DIRECTORY` URLs."""

    def __init__(self, config: ModelConfig, memory: MemoryWeights) -> None:
        """`config`: of the model that is served; checkpoints of another are refused."""
        self._config = config
        self._memory = memory

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The checked tensors of a manifest. Blocks on files. Raises WeightUpdateError."""
        if manifest.url.startswith(_MEMORY):
            return self._memory.fetch(manifest)
        if not manifest.url.startswith(_FILE):
            raise WeightUpdateError(
                "this server cannot read this URL",
                field="url",
                received=manifest.url,
                fix="name a checkpoint directory that it can read: file:/DIRECTORY",
            )
        directory = Path(manifest.url.removeprefix(_FILE))
        try:
            model = load_model(directory)
        except CheckpointError as error:
            raise WeightUpdateError(
                f"the checkpoint cannot be used: {error.message}",
                field=error.field,
                received=error.received,
                fix=error.fix,
            ) from error
        if model.config != self._config:
            raise WeightUpdateError(
                "is of another model", field="url", received=manifest.url, fix="start a server for it"
            )
        tensors = dict(model.named_parameters())
        check_tensors(manifest, tensors)
        return tensors


def checkpoint_manifest(directory: Path | str, version: PolicyVersion) -> WeightManifest:
    """The manifest of a Hugging Face directory, for `POST /admin/weights` of servers that can read it.

    Raises CheckpointError.
    """
    path = Path(directory).resolve()
    return describe_tensors(version, dict(load_model(path).named_parameters()), f"{_FILE}{path}")
