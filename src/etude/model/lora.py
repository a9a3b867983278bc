"""Low-rank adapters (Hu et al. 2021, LoRA) on any model.

    y = x weight + alpha / rank * (x right) left     weight is frozen; left [m, rank], right [rank, n] train

The sum of weight and factors is not computed during training: 16-bit weights would lose most of a small
update to rounding. Factors, their gradients and their optimiser are float32. Our own models multiply with
`AdaptedOps`, in the trainer as in the engine; in transformers' models, linear modules add their factors'
product, and stacks of experts are summed for each forward pass.

A stack of matrices, as grouped experts have, gets a pair of factors for each matrix.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from blake3 import blake3
from torch import Tensor, nn

from etude.config import AdapterConfig
from etude.errors import CheckpointError, ConfigError
from etude.model.adapted_ops import AdaptedOps, Pair
from etude.model.language_model import LanguageModel
from etude.model.ops import Ops
from etude.records import ADAPTER_PREFIX

_ATTENTION = frozenset({"qkv", "out", "query_down", "query_up", "compress", "key_up", "value_up"})
_FEED_FORWARD = frozenset({"gate_up", "down"})
"""Last names of parameters of the architectures that we implement."""
_WORDS = {"attention": ("attn", "attention"), "feed_forward": ("mlp", "experts", "feed_forward", "moe")}
"""Words in the names of transformers' modules that hold such parameters."""
_ROUTERS = ("gate", "router")
_SAMPLED_VALUES = 1024
"""Values of each parameter that identify a model."""


class Factors(nn.Module):
    """left [..., m, rank] and right [..., rank, n] of one weight, in float32."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        """For `weight` [..., m, n]: left is zero, so that the model is unchanged; right is random."""
        super().__init__()
        *stack, rows, columns = weight.shape
        bound = 1 / math.sqrt(columns)
        right = torch.empty(*stack, rank, columns).uniform_(-bound, bound, generator=generator)
        self.left = nn.Parameter(torch.zeros(*stack, rows, rank, device=weight.device))
        self.right = nn.Parameter(right.to(weight.device))


class Adapters(nn.Module):
    """The adapters of one model: a module with all trainable parameters.

    The constructor changes the model: its weights are frozen, and its forward passes use the factors.
    """

    def __init__(self, model: nn.Module, config: AdapterConfig) -> None:
        """Raises ConfigError if a target matches no weight, the rank is above that of every weight, or a
        weight is sharded."""
        super().__init__()
        self.config = config
        self.scale = config.alpha / config.rank
        self.base_digest = _identify(model)
        weights = {name: p for name, p in model.named_parameters() if p.ndim >= 2}
        if isinstance(model, LanguageModel):
            weights = {n: p for n, p in weights.items() if _last(n) in _ATTENTION | _FEED_FORWARD}
        self._weights = {name: weights[name] for name in adapted_names(weights, config.targets)}
        _check_rank(config.rank, self._weights)
        self._factors: dict[str, Factors] = {}
        for name, weight in self._weights.items():
            _check_whole(name, weight)
            generator = torch.Generator().manual_seed(config.seed + zlib.crc32(name.encode()))
            self._factors[name] = Factors(weight, config.rank, generator)
            self.add_module(name.replace(".", "/"), self._factors[name])
        model.requires_grad_(requires_grad=False)
        if isinstance(model, LanguageModel):
            model.adapt = self._adapt
        else:
            for name in self._factors:
                self._hook(model, name)

    def factors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name of each adapted weight, and its left and right."""
        for name, pair in self._factors.items():
            yield name, pair.left.detach(), pair.right.detach()

    def published(self) -> dict[str, Tensor]:
        """The tensors to publish; the inverse is `pairs_of`."""
        return {
            f"{ADAPTER_PREFIX}{name}.{side}": factor
            for name, left, right in self.factors()
            for side, factor in (("left", left * self.scale), ("right", right))
        }

    @torch.no_grad()
    def merge(self) -> None:
        """Merges the factors into the model, rounded to the type of its weights, and resets them."""
        for name, pair in pairs_of(self.published()).items():
            self._weights[name].copy_(sum_of(self._weights[name], pair))
            self._factors[name].left.zero_()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within it the model is merged, to be saved; afterwards it is restored, bit for bit. Holds a copy of
        the adapted weights meanwhile."""
        kept = [(place, place.detach().clone()) for place in self._weights.values()]
        kept += [(pair.left, pair.left.detach().clone()) for pair in self._factors.values()]
        self.merge()
        try:
            yield
        finally:
            with torch.no_grad():
                for place, values in kept:
                    place.copy_(values)

    def state(self) -> dict[str, Any]:
        """The state for `load_state` with the same base: plain values and the live factors."""
        return {
            "base": self.base_digest,
            "config": self.config.model_dump(mode="json"),
            "factors": self.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Loads factors. Raises CheckpointError and changes nothing if they were trained on another base or
        with another configuration."""
        for field, given, own in (
            ("base", state["base"], self.base_digest),
            ("config", state["config"], self.config.model_dump(mode="json")),
            ("targets", " ".join(sorted(state["factors"])), " ".join(sorted(self.state_dict()))),
        ):
            if given != own:
                raise CheckpointError(
                    "the adapters belong to another base model or configuration",
                    field=f"adapter.{field}",
                    received=given,
                    fix="resume with the configuration and the initial checkpoint that the run started with",
                )
        self.load_state_dict(state["factors"])

    def _pair(self, name: str) -> Pair:
        pair = self._factors[name]
        return pair.left * self.scale, pair.right

    def _adapt(self, ops: Ops) -> Ops:
        pairs = {id(weight): self._pair(name) for name, weight in self._weights.items()}
        return cast(Ops, AdaptedOps(ops, [pairs], [None]))

    def _hook(self, model: nn.Module, name: str) -> None:
        """Registers hooks by which a module of transformers adds the factors of one of its weights."""
        path, _, own = name.rpartition(".")
        module, weight = model.get_submodule(path), self._weights[name]
        if isinstance(module, nn.Linear):

            def add(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
                left, right = self._pair(name)
                return (out.float() + given[0].float() @ right.mT @ left.mT).to(out.dtype)

            module.register_forward_hook(add)
            return

        def shadow(module: nn.Module, _: Any) -> None:
            module.__dict__[own] = sum_of(weight, self._pair(name))

        def uncover(module: nn.Module, *_: Any) -> None:
            module.__dict__.pop(own, None)

        module.register_forward_pre_hook(shadow)
        module.register_forward_hook(uncover, always_call=True)


def sum_of(weight: Tensor, pair: Pair) -> Tensor:
    """weight + left right in float32, then rounded to the type of the weight; on its device."""
    left, right = (factor.to(weight.device) for factor in pair)
    return (weight.float() + left @ right).to(weight.dtype)


def pairs_of(tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    """The factors among published tensors, by the name of their weight: left * alpha / rank, and right."""
    ends = len(".left")
    return {
        name[len(ADAPTER_PREFIX) : -ends]: (tensor, tensors[name[:-ends] + ".right"])
        for name, tensor in tensors.items()
        if name.startswith(ADAPTER_PREFIX) and name.endswith(".left")
    }


def adapted_names(parameters: Mapping[str, Tensor], targets: Sequence[str]) -> list[str]:
    """Names of the model's matrices that match `targets` (see AdapterConfig). Raises ConfigError if a target
    matches none."""
    found: set[str] = set()
    for target in targets:
        names = {name for name in parameters if _matches(name, target)}
        if not names:
            raise ConfigError(
                "matches no weight of the model",
                field="rl.adapter.targets",
                received=target,
                fix="use attention, feed_forward, or one of "
                + ", ".join(sorted({_last(name) for name in parameters if not _is_router(name)})),
            )
        found |= names
    return [name for name in parameters if name in found]


def _matches(name: str, target: str) -> bool:
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
    """The last part of the parameter's name, or of its module's if that is `weight`."""
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


def _identify(model: nn.Module) -> str:
    """Digest of some values of every parameter: equal for the same weights, cheap for large ones."""
    digest = blake3()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        values = flat[:: max(1, len(flat) // _SAMPLED_VALUES)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()
