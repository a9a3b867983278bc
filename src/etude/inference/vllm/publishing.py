"""The trainer's weights as snapshots that vLLM reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from etude.errors import WeightUpdateError
from etude.inference.vllm.probes import Probe
from etude.inference.vllm.snapshots import SnapshotDirectory
from etude.model.loading import AnyModel, save_any_model
from etude.records import PolicyVersion, WeightManifest


class ModelSnapshots:
    """Implements WeightPublisher over a SnapshotDirectory, for one architecture.

    Each snapshot carries a probe that the published tensors themselves were scored with, so nobody has to
    load them again to know what they should compute.
    """

    def __init__(self, directory: SnapshotDirectory, model: AnyModel) -> None:
        """`model`: of which tensors will be published; its weights are not kept, nor changed."""
        self._directory = directory
        # A copy in which every parameter is a fresh object on the same memory: what is published is put in
        # its place, and parameters that are one in two places stay one.
        known: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
        known |= {id(own): nn.Parameter(own.detach(), requires_grad=False) for own in model.parameters()}
        self._shell = copy.deepcopy(model, known)

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher.publish. Raises WeightUpdateError for another model's tensors."""
        shell, places = self._shell, dict(self._shell.named_parameters())
        if places.keys() != tensors.keys():
            raise WeightUpdateError(
                "other tensors than the model's parameters",
                field="tensors",
                received=sorted(places.keys() ^ tensors.keys())[:4],
                fix="publish the model that the run began with, adapters merged",
            )
        for name, place in places.items():
            place.data = tensors[name].detach()

        def write(directory: Path) -> None:
            save_any_model(shell, directory)

        with torch.no_grad():
            return self._directory.publish(version, write, Probe.of(shell))
