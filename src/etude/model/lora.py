"""Low-rank adapters (Hu et al. 2021, LoRA) on any model, folded into its weights.

    weight = base + alpha / rank * left @ right        base is fixed, left [m, rank] and right [rank, n] learn

The model always holds the sum: it computes, is scored, published and saved as if there were no adapters, with
its own kernels, and the engine gets the very tensors that the trainer computes with. In the backward pass the
gradient of a weight is projected onto its two factors as soon as it is complete, and let go of; so gradients
and optimiser states exist for factors alone. The other price is a second copy of the adapted weights, which
lies in the main memory, not on the device: the sum is formed anew from it after each update, so nothing
drifts, whatever the type of the weights.

A stack of matrices, as grouped experts have, gets a pair of factors for each matrix.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from etude.config import AdapterConfig
from etude.errors import CheckpointError, ConfigError

_ATTENTION = frozenset({"qkv", "out", "query_down", "query_up", "compress", "key_up", "value_up"})
_FEED_FORWARD = frozenset({"gate_up", "down"})
"""Last names of parameters of the architectures that are defined here."""
_WORDS = {"attention": ("attn", "attention"), "feed_forward": ("mlp", "experts", "feed_forward", "moe")}
"""What modules of transformers' models are called that hold such parameters."""
_ROUTERS = ("gate", "router")
_SAMPLED_VALUES = 1024
"""Values of each parameter that identify a model."""


class Factors(nn.Module):
    """left [..., m, rank] and right [..., rank, n] of one weight, in float32."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        """For `weight` [..., m, n]: left is zero, so that the model begins as it is; right is drawn."""
        super().__init__()
        *stack, rows, columns = weight.shape
        bound = 1 / math.sqrt(columns)
        right = torch.empty(*stack, rank, columns).uniform_(-bound, bound, generator=generator)
        self.left = nn.Parameter(torch.zeros(*stack, rows, rank, device=weight.device))
        self.right = nn.Parameter(right.to(weight.device))


class Adapters(nn.Module):
    """The adapters of one model: a module whose parameters are all that is trained.

    Making them changes the model: only adapted weights have a gradient, and it goes to the factors.
    """

    def __init__(self, model: nn.Module, config: AdapterConfig) -> None:
        """Raises ConfigError where a target names no weight, the rank is above that of every weight, or a
        weight is spread over ranks."""
        super().__init__()
        self.config = config
        self.scale = config.alpha / config.rank
        self.base_digest = _identify(model)
        self._weights = {name: p for name, p in model.named_parameters() if p.ndim >= 2}
        names = adapted_names(self._weights, config.targets)
        self._weights = {name: self._weights[name] for name in names}
        _check_rank(config.rank, self._weights)
        self._base: dict[str, Tensor] = {}
        self._factors: dict[str, Factors] = {}
        model.requires_grad_(requires_grad=False)
        for name, weight in self._weights.items():
            _check_whole(name, weight)
            generator = torch.Generator().manual_seed(config.seed + zlib.crc32(name.encode()))
            self._base[name] = weight.detach().to("cpu", copy=True)
            self._factors[name] = Factors(weight, config.rank, generator)
            self.add_module(name.replace(".", "/"), self._factors[name])
            weight.requires_grad_()
            weight.register_post_accumulate_grad_hook(partial(self._project, name))

    def factors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name of each adapted weight, and its left and right."""
        for name, pair in self._factors.items():
            yield name, pair.left.detach(), pair.right.detach()

    @torch.no_grad()
    def merge(self) -> None:
        """Puts base + scale * left @ right into the model, in the type of its weights."""
        for name, left, right in self.factors():
            weight, base = self._weights[name].data, self._base[name]
            total = base.to(weight.device, torch.float32)
            if total.ndim == 2:
                total = torch.addmm(total, left, right, alpha=self.scale)
            else:
                stacks = (total.flatten(0, -3), left.flatten(0, -3), right.flatten(0, -3))
                total = torch.baddbmm(*stacks, alpha=self.scale).view(weight.shape)
            weight.copy_(total)

    def state(self) -> dict[str, Any]:
        """What `load_state` needs to go on with the same base: plain values and the live factors."""
        return {
            "base": self.base_digest,
            "config": self.config.model_dump(mode="json"),
            "factors": self.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over factors and merges them. Raises CheckpointError and changes nothing if they were trained
        on another base or with another configuration."""
        for field, given, own in (
            ("base", state["base"], self.base_digest),
            ("config", state["config"], self.config.model_dump(mode="json")),
            ("targets", " ".join(sorted(state["factors"])), " ".join(sorted(self.state_dict()))),
        ):
            if given != own:
                raise CheckpointError(
                    "the adapters are of another base or configuration",
                    field=f"adapter.{field}",
                    received=given,
                    fix="resume with the configuration and the initial checkpoint that the run began with",
                )
        self.load_state_dict(state["factors"])
        self.merge()

    @torch.no_grad()
    def _project(self, name: str, weight: Tensor) -> None:
        """Moves a weight's gradient to its factors."""
        assert weight.grad is not None, "called when it is complete"
        gradient, pair = weight.grad.float(), self._factors[name]
        weight.grad = None
        _accumulate(pair.left, gradient @ pair.right.transpose(-1, -2), self.scale)
        _accumulate(pair.right, pair.left.transpose(-1, -2) @ gradient, self.scale)


def adapted_names(parameters: Mapping[str, Tensor], targets: Sequence[str]) -> list[str]:
    """Which of a model's matrices `targets` (see AdapterConfig) mean. Raises ConfigError if one means
    nothing."""
    found: set[str] = set()
    for target in targets:
        names = {name for name in parameters if _is_meant(name, target)}
        if not names:
            raise ConfigError(
                "names no weight of the model",
                field="rl.adapter.targets",
                received=target,
                fix="use attention, feed_forward, or one of "
                + ", ".join(sorted({_last(name) for name in parameters if not _is_router(name)})),
            )
        found |= names
    return [name for name in parameters if name in found]


def _is_meant(name: str, target: str) -> bool:
    if name.endswith("bias"):
        return False
    if target not in _WORDS:
        return _last(name) == target
    own = _ATTENTION if target == "attention" else _FEED_FORWARD
    if _last(name) in own:
        return True
    modules = name.split(".")[:-1]
    return not _is_router(name) and any(word in part for part in modules for word in _WORDS[target])


def _last(name: str) -> str:
    """The parameter's name, or of its module where it is just called weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _is_router(name: str) -> bool:
    return _last(name).endswith(_ROUTERS)


def _check_whole(name: str, weight: Tensor) -> None:
    if type(weight.data) is not Tensor:
        raise ConfigError(
            "adapters need whole weights in each process",
            field="rl.adapter.rank",
            received=f"{name}: {type(weight.data).__name__}",
            fix="set parallel.fsdp, parallel.expert and parallel.tensor to 1",
        )


def _check_rank(rank: int, weights: Mapping[str, Tensor]) -> None:
    largest = max(min(weight.shape[-2:]) for weight in weights.values())
    if rank > largest:
        raise ConfigError(
            "is above the full rank of every adapted weight",
            field="rl.adapter.rank",
            received=rank,
            fix=f"set it to {largest} or less, or to 0 to train all weights",
        )


def _accumulate(parameter: nn.Parameter, gradient: Tensor, scale: float) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.mul_(scale)
    else:
        parameter.grad.add_(gradient, alpha=scale)


def _identify(model: nn.Module) -> str:
    """Digest of some values of every parameter: equal for the same weights, cheap for large ones."""
    digest = blake3()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        values = flat[:: max(1, len(flat) // _SAMPLED_VALUES)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()
