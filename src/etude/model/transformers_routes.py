"""Expert routes of transformers' mixtures of experts.

Their routers are modules that end with a top-k over the experts' scores and compute gates from its result.
During a pass, our routes replace the result of this top-k; everything else, including gates and gradients, is
the router's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from etude.errors import RouteReplayError
from etude.model.feed_forward import RouterStatistics

Choose = Callable[[int, Tensor], Tensor]
"""(layer among those that route, scores [rows, experts] without gradient) -> experts [rows, top_k]."""
_ROUTER = re.compile(r"(Router|Gate)$")


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a mixture of experts, by layer; empty for a dense model, and for a mixture with routers
    of an unusual form."""
    return [
        module
        for module in model.modules()
        if _ROUTER.search(type(module).__name__)
        and hasattr(module, "top_k")
        and hasattr(module, "num_experts")
    ]


def has_experts(model: nn.Module) -> bool:
    """Whether it is a mixture of experts, by the names of transformers' modules."""
    return any("Experts" in type(module).__name__ for module in model.modules())


class LayerLoads:
    """Sums of the routers' probabilities and of their assignments, over the groups of one pass."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor, int]] = {}
        """Layer -> probabilities [experts], assignments [experts], and the number of rows."""

    def add(self, layer: int, probabilities: Tensor, chosen: Tensor) -> None:
        """probabilities [rows, experts], differentiable, and experts [rows, top_k] of some rows."""
        counts = torch.zeros_like(probabilities[0].detach())
        flat = chosen.flatten()
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))
        sums = probabilities.sum(0), counts, len(probabilities)
        if layer in self._sums:
            before = self._sums[layer]
            sums = before[0] + sums[0], before[1] + sums[1], before[2] + sums[2]
        self._sums[layer] = sums

    def append_to(self, statistics: RouterStatistics) -> None:
        """Appends the means over all rows, layer by layer."""
        for _, (probabilities, counts, num_rows) in sorted(self._sums.items()):
            statistics.probabilities.append(probabilities / num_rows)
            statistics.shares.append(counts / counts.sum())


@contextmanager
def routed_by(
    routers: Sequence[nn.Module], choose: Choose, loads: LayerLoads | None, real: Tensor
) -> Iterator[None]:
    """Selects the experts of every row of one forward pass with `choose`.

    `real`: the routers' input rows that are not padding; only those are added to `loads`. Raises
    RouteReplayError, during the pass, for a router that does not call top-k as expected.
    """
    with ExitStack() as stack:
        for layer, router in enumerate(routers):
            own = router.forward
            router.forward = partial(_route, own, router, layer, choose, loads, real)
            stack.callback(router.__dict__.pop, "forward")
        yield


def _route(
    forward: Callable[[Tensor], Any],
    router: nn.Module,
    layer: int,
    choose: Choose,
    loads: LayerLoads | None,
    real: Tensor,
    *arguments: Any,
) -> Any:
    choice = _Choice(cast(Any, router), partial(choose, layer))
    with choice:
        output = forward(*arguments)
    if choice.chosen is None:
        raise RouteReplayError(
            "this router's choice cannot be replaced",
            field="model",
            received=type(router).__name__,
            fix='set rl.router_replay = "off", and balance weights to 0',
        )
    if loads is not None:
        logits = _logits_of(router, output)[real]
        if hasattr(router, "e_score_correction_bias"):
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
        else:
            probabilities = logits.softmax(-1)
        loads.add(layer, probabilities, choice.chosen[real])
    return output


def _logits_of(router: nn.Module, output: Sequence[Tensor]) -> Tensor:
    """Logits [rows, experts] float32 among a router's outputs: after the gates if these also have a column
    for each expert, and before the chosen experts, which are integers."""
    count = cast(Any, router).num_experts
    wide = [tensor for tensor in output if tensor.shape[-1] == count and tensor.is_floating_point()]
    if not wide:
        raise RouteReplayError(
            "this router does not return its scores, so its load cannot be measured",
            field="model",
            received=type(router).__name__,
            fix="set the balance weight to 0",
        )
    return wide[-1].reshape(-1, count).float()


class _Choice(TorchFunctionMode):
    """Replaces the result of the top-k over all experts by another choice."""

    def __init__(self, router: Any, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._shape = (int(router.num_experts), int(router.top_k))
        self._choose = choose
        self.chosen: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk) and args[0].ndim == 2:
            k = args[1] if len(args) > 1 else kwargs["k"]
            if (args[0].shape[-1], k) == self._shape:
                self.chosen = self._choose(args[0].detach())
                return torch.return_types.topk((args[0].gather(-1, self.chosen), self.chosen))
        return func(*args, **kwargs)
