"""AdamW (Loshchilov and Hutter 2019) on parts of parameters, with states in float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from etude.config import OptimizerConfig
from etude.training.optimizer.rounding import Rounding
from etude.training.parallel.layout import Layout

_EPS = 1e-8
_FIRST, _SECOND, _STEP = "exp_avg", "exp_avg_sq", "step"


class AdamW:
    """AdamW for the parameters that Muon does not update.

    float32 weights with float32 states use PyTorch's fused implementation. bfloat16 weights or states are
    updated in float32 and rounded stochastically (see `rounding`).
    """

    def __init__(self, layout: Layout, names: Sequence[str], config: OptimizerConfig) -> None:
        self._parts = {name: layout.parts[name] for name in names}
        self._decays = {name: config.weight_decay if len(layout.shapes[name]) >= 2 else 0.0 for name in names}
        self._config = config
        dtype = getattr(torch, config.state_dtype)
        self.state: dict[str, dict[str, Tensor]] = {
            name: {
                _STEP: torch.zeros((), dtype=torch.float32, device=part.device),
                _FIRST: torch.zeros_like(part, dtype=dtype),
                _SECOND: torch.zeros_like(part, dtype=dtype),
            }
            for name, part in self._parts.items()
        }
        """By name: number of steps with a gradient [], first and second moment, shaped like the parts."""
        plain = [n for n in names if self._parts[n].dtype == dtype == torch.float32]
        self._fused = _make_fused({name: self._parts[name] for name in plain}, self._decays, config)
        self._rounded = [name for name in names if name not in set(plain)]
        if self._fused is not None:
            for name, parameter in self._fused_parameters():
                self._fused.state[parameter] = self.state[name]

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor | None], learning_rate: float, rounding: Rounding) -> None:
        """Updates every parameter that has a gradient."""
        if self._fused is not None:
            for name, parameter in self._fused_parameters():
                parameter.grad = gradients[name]
            for group in self._fused.param_groups:
                group["lr"] = learning_rate
            self._fused.step()
            self._fused.zero_grad(set_to_none=True)
        for name in self._rounded:
            gradient = gradients[name]
            if gradient is not None:
                self._step_rounded(name, gradient.float(), learning_rate, rounding)

    def _step_rounded(self, name: str, gradient: Tensor, learning_rate: float, rounding: Rounding) -> None:
        config, part, state = self._config, self._parts[name], self.state[name]
        state[_STEP] += 1
        taken = state[_STEP].double()  # stays a tensor: a Python number would synchronise with the device
        first = state[_FIRST].float().lerp_(gradient, 1 - config.beta1)
        second = state[_SECOND].float().lerp_(gradient.square(), 1 - config.beta2)
        rounding.store(name, state[_FIRST], first)
        rounding.store(name, state[_SECOND], second)
        mean = first / (1 - config.beta1**taken)
        spread = (second / (1 - config.beta2**taken)).sqrt_().add_(_EPS)
        weights = part.float() * (1 - learning_rate * self._decays[name])
        rounding.store(name, part, weights.addcdiv_(mean, spread, value=-learning_rate))

    def _fused_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        assert self._fused is not None
        for group in self._fused.param_groups:
            yield from zip(group["names"], group["params"], strict=True)


def _make_fused(
    parts: Mapping[str, Tensor], decays: Mapping[str, float], config: OptimizerConfig
) -> torch.optim.AdamW | None:
    groups: list[dict[str, Any]] = []
    for decay in sorted(set(decays.values()), reverse=True):
        names = [name for name in parts if decays[name] == decay]
        if names:
            parameters = [nn.Parameter(parts[name]) for name in names]
            groups.append({"params": parameters, "names": names, "weight_decay": decay})
    if not groups:
        return None
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=_EPS, fused=True)
