"""Copies in host memory of what is being trained, to be written while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from etude.model.loading import AnyModel
from etude.training.checkpoints.shards import ModelShards, is_shard


@torch.no_grad()
def copy_model(model: AnyModel | ModelShards) -> AnyModel | ModelShards:
    """The model as it is now, or what of it lies here, without gradients. Tied weights stay tied; what
    computes (`ops`) is shared."""
    if isinstance(model, ModelShards):
        return replace(model, weights=copy_state(model.weights))
    known: dict[int, Any] = {id(model.ops): model.ops}
    for parameter in model.parameters():
        known[id(parameter)] = nn.Parameter(_host(parameter), requires_grad=False)
    for buffer in model.buffers():
        known[id(buffer)] = _host(buffer)
    return copy.deepcopy(model, known)


def copy_state(value: Any) -> Any:
    """Plain values and tensors, nested: copied, tensors into host memory."""
    if isinstance(value, Tensor):
        return _host(value)
    if isinstance(value, Mapping):
        return {key: copy_state(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_state(entry) for entry in value)
    return copy.deepcopy(value)


def _host(tensor: Tensor) -> Tensor:
    if is_shard(tensor):
        from etude.training.checkpoints.shard_files import part_on_host

        return part_on_host(tensor)
    return tensor.detach().to("cpu", copy=True)
