"""Double-buffered weights: those in service and the staged ones, so that a swap exchanges two references.

Several adapters can lie on the base weights in service; a new version of an adapter leaves the base.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from etude.config import ModelConfig
from etude.errors import WeightUpdateError
from etude.inference.forward import ForwardPass
from etude.inference.sequences import NO_ADAPTER
from etude.model import DRAFT_PREFIX, DraftLayers, LanguageModel, build_model
from etude.model.adapted_ops import Pair
from etude.model.lora import pairs_of
from etude.records import ADAPTER_PREFIX, PolicyVersion
from etude.weights.manifest import check_staged


@dataclass(frozen=True, slots=True)
class Runner:
    """A model and its forward pass."""

    model: LanguageModel
    compute: ForwardPass
    drafts: DraftLayers | None
    """MTP layers that draft for it."""


def make_runner(
    config: ModelConfig,
    vocab_size: int,
    make_forward: Callable[[LanguageModel, DraftLayers | None], ForwardPass],
    device: torch.device,
    dtype: torch.dtype,
    drafts: DraftLayers | None,
) -> Runner:
    """A runner without weights. `drafts`: its first draft layers, which are copied."""
    model = build_model(config, vocab_size).requires_grad_(requires_grad=False)
    # Cast first: float32 weights of a large model would not fit next to those in service.
    if dtype != torch.float32:
        model.cast(dtype)
    model = model.to(device)
    drafts = copy.deepcopy(drafts)
    if drafts is not None:
        drafts.requires_grad_(requires_grad=False).to(device, dtype)
    return Runner(model, make_forward(model, drafts), drafts)


@dataclass(frozen=True, slots=True)
class _Staged:
    """The version that `activate` will put into service."""

    version: PolicyVersion
    base_digest: str | None
    is_new_base: bool
    adapter: Any
    """The adapter as the forward pass has packed it; None without one."""


class DoubleWeights:
    """Two runners over one cache: one serves, the other receives the next version.

    Staging does not touch the runner in service, so it may run in another thread than the engine's steps. The
    second runner is created when needed, and then kept, or dropped at each activation.
    """

    def __init__(self, make_runner: Callable[[], Runner], keep_spare: bool) -> None:
        """`keep_spare`: whether the runner that leaves service is kept for the next version."""
        self._make_runner = make_runner
        self._keep_spare = keep_spare
        self.active = make_runner()
        self.version: PolicyVersion | None = None
        """The version that was activated last."""
        self.served: dict[str | None, PolicyVersion] = {}
        """All versions in service, by the name of their adapter."""
        self._adapters: dict[str, Any] = {}
        self._base_digest: str | None = None
        self._spare: Runner | None = self.active
        self._staged: _Staged | None = None

    def stage(
        self, version: PolicyVersion, tensors: Mapping[str, Tensor], base_digest: str | None = None
    ) -> None:
        """Copies the next weights into the spare runner: the model's, those of its draft layers if given
        (`DRAFT_PREFIX`; else they stay as they are), and the factors of the version's adapter. `base_digest`:
        of all tensors but the factors; a base in service is not copied again. Raises WeightUpdateError if
        they do not fit; then nothing is staged."""
        self._staged = None
        pairs = pairs_of(tensors)
        check_factors_fit(self.active.model, pairs, version)
        is_new = version.adapter is None or base_digest is None or base_digest != self._base_digest
        runner = self._load_spare(tensors) if is_new else self.active
        adapter = runner.compute.pack_adapter(pairs) if pairs else None
        self._staged = _Staged(version, base_digest, is_new, adapter)

    def _load_spare(self, tensors: Mapping[str, Tensor]) -> Runner:
        prefixes = (DRAFT_PREFIX, ADAPTER_PREFIX)
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
        check_tensors_fit(self.active.model, own)
        drafts = self._next_drafts(tensors)
        if self._spare is None:
            self._spare = self._make_runner()
            self._spare.model.ops = self.active.model.ops
        _copy(self._spare.model, own)
        if self._spare.drafts is not None:
            _copy(self._spare.drafts, drafts)
        self._spare.compute.load_weights()
        return self._spare

    def slot_of(self, adapter: str | None) -> int:
        """Slot of an adapter in service, by which rows refer to it."""
        return NO_ADAPTER if adapter is None else [*self._adapters].index(adapter)

    def _next_drafts(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of the draft layers: from `tensors`, else those in service. Empty without draft layers."""
        if self.active.drafts is None:
            return {}
        start = len(DRAFT_PREFIX)
        given = {name[start:]: tensor for name, tensor in tensors.items() if name.startswith(DRAFT_PREFIX)}
        if not given:
            return dict(self.active.drafts.named_parameters())
        check_tensors_fit(self.active.drafts, given)
        return given

    def activate(self, version: PolicyVersion) -> bool:
        """Puts the staged version into service. Returns whether its base is new, which drops all earlier
        adapters. Raises WeightUpdateError if it is not staged."""
        staged = check_staged(version, self._staged)
        if staged.is_new_base:
            assert self._spare is not None, "the spare runner holds what was staged"
            served, self.active = self.active, self._spare
            self._spare = served if self._keep_spare and served is not self.active else None
            self._adapters, self.served = {}, {}
        if version.adapter is not None:
            self._adapters[version.adapter] = staged.adapter
        self.active.compute.use_adapters([*self._adapters.values()])
        self.served[version.adapter] = self.version = version
        self._base_digest, self._staged = staged.base_digest, None
        return staged.is_new_base

    def load_cache(self) -> None:
        """See ForwardPass, for both runners."""
        self.active.compute.load_cache()
        if self._spare is not None and self._spare is not self.active:
            self._spare.compute.load_cache()


@torch.no_grad()
def _copy(target: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in target.named_parameters():
        parameter.copy_(tensors[name])


def check_factors_fit(model: nn.Module, pairs: Mapping[str, Pair], version: PolicyVersion) -> None:
    """Raises WeightUpdateError unless `pairs` are finite factors of the model's weights, present if and only
    if `version` names an adapter."""
    own = dict(model.named_parameters())
    if bool(pairs) != (version.adapter is not None):
        raise WeightUpdateError(
            "adapter factors must come with a version that names an adapter",
            field="version.adapter",
            received=f"{version.adapter}, {len(pairs)} pairs of factors",
        )
    for name, (left, right) in pairs.items():
        shape = (*left.shape[:-1], right.shape[-1])
        fits = name in own and shape == own[name].shape and left.shape[-1] == right.shape[-2]
        if not fits or not bool(left.isfinite().all() and right.isfinite().all()):
            raise WeightUpdateError(
                "is not finite" if fits else "is of another model",
                field=f"{ADAPTER_PREFIX}{name}",
                received=f"{tuple(left.shape)} and {tuple(right.shape)}",
                fix="publish adapters of the base model in service",
            )


def check_tensors_fit(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightUpdateError unless `tensors` are the model's, by name and shape, and all finite."""
    own = dict(model.named_parameters())
    if own.keys() != tensors.keys():
        differing = sorted(own.keys() ^ tensors.keys())
        raise WeightUpdateError("the tensors are not those of the model", field="tensors", received=differing)
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise WeightUpdateError(
                f"shape differs from the model's {tuple(own[name].shape)}",
                field=name,
                received=tuple(tensor.shape),
            )
        check_finite(name, tensor)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises WeightUpdateError for weights that are not numbers."""
    if not bool(torch.isfinite(tensor).all()):
        raise WeightUpdateError(
            "holds values that are not finite",
            field=name,
            received=f"{int((~torch.isfinite(tensor)).sum())} of {tensor.numel()}",
            fix="publish a version from before the training diverged",
        )
