"""The weights in service and those beside them, so that a swap is an exchange of two references."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from etude.config import ModelConfig
from etude.errors import WeightUpdateError
from etude.inference.forward import ForwardPass
from etude.model import DRAFT_PREFIX, DraftLayers, LanguageModel, build_model
from etude.records import PolicyVersion

MakeForward = Callable[[LanguageModel, DraftLayers | None], ForwardPass]


@dataclass(frozen=True, slots=True)
class Runner:
    """A model and what computes it."""

    model: LanguageModel
    compute: ForwardPass
    drafts: DraftLayers | None
    """Layers that draft for it."""


class DoubleWeights:
    """Two runners over one cache: one serves, the other takes the next version.

    Staging touches nothing that serves, so it may run in another thread than the engine's steps. The second
    runner is made when it is needed, and kept from then on or let go with each activation.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        make_forward: MakeForward,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        drafts: DraftLayers | None = None,
        keep_spare: bool = True,
    ) -> None:
        """`device` and `dtype`: where and how the models lie. `drafts`: the draft layers at first; they are
        copied. `keep_spare`: whether the runner that no longer serves is kept for the next version."""
        self._config = config
        self._vocab_size = vocab_size
        self._make_forward = make_forward
        self._device = device
        self._dtype = dtype
        self._first_drafts = drafts
        self._keep_spare = keep_spare
        self.active = self._make_runner()
        self.version: PolicyVersion | None = None
        self._spare: Runner | None = self.active
        self._staged: PolicyVersion | None = None

    def stage(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> None:
        """Takes the next weights beside the current ones: the model's, and its draft layers' where they are
        among them (`DRAFT_PREFIX`); else those stay as they are. Raises WeightUpdateError if they do not fit;
        then nothing is staged."""
        self._staged = None
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(DRAFT_PREFIX)}
        check_tensors_fit(self.active.model, own)
        drafts = self._next_drafts(tensors)
        if self._spare is None:
            self._spare = self._make_runner()
            self._spare.model.ops = self.active.model.ops
        _copy(self._spare.model, own)
        if self._spare.drafts is not None:
            _copy(self._spare.drafts, drafts)
        self._spare.compute.load_weights()
        self._staged = version

    def _next_drafts(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Of the draft layers: from `tensors`, else those in service. Empty where nobody drafts."""
        if self.active.drafts is None:
            return {}
        start = len(DRAFT_PREFIX)
        given = {name[start:]: tensor for name, tensor in tensors.items() if name.startswith(DRAFT_PREFIX)}
        if not given:
            return dict(self.active.drafts.named_parameters())
        check_tensors_fit(self.active.drafts, given)
        return given

    def activate(self, version: PolicyVersion) -> None:
        """Puts the staged version into service. Raises WeightUpdateError if it is not staged."""
        if self._staged is None or self._staged != version or self._spare is None:
            raise WeightUpdateError(
                "version is not staged", field="version", received=f"{version}; staged {self._staged}"
            )
        served, self.active = self.active, self._spare
        self._spare = served if self._keep_spare and served is not self.active else None
        self.version, self._staged = version, None

    @property
    def num_sets(self) -> int:
        """Sets of weights that take memory."""
        return 1 if self._spare is None or self._spare is self.active else 2

    def load_cache(self) -> None:
        """See ForwardPass, for both runners."""
        self.active.compute.load_cache()
        if self._spare is not None and self._spare is not self.active:
            self._spare.compute.load_cache()

    def _make_runner(self) -> Runner:
        model = build_model(self._config, self._vocab_size).requires_grad_(requires_grad=False)
        # Cast first: float32 weights of a large model would not fit beside those in service.
        if self._dtype != torch.float32:
            model.cast(self._dtype)
        model = model.to(self._device)
        drafts = copy.deepcopy(self._first_drafts)
        if drafts is not None:
            drafts.requires_grad_(requires_grad=False).to(self._device, self._dtype)
        return Runner(model, self._make_forward(model, drafts), drafts)


@torch.no_grad()
def _copy(target: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in target.named_parameters():
        parameter.copy_(tensors[name])


def check_tensors_fit(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightUpdateError unless `tensors` are the model's, by name and shape, and all finite."""
    own = dict(model.named_parameters())
    if own.keys() != tensors.keys():
        differing = sorted(own.keys() ^ tensors.keys())
        raise WeightUpdateError("other tensors than the model's", field="tensors", received=differing)
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise WeightUpdateError(
                f"shape differs from the model's {tuple(own[name].shape)}",
                field=name,
                received=tuple(tensor.shape),
            )
        if not bool(torch.isfinite(tensor).all()):
            raise WeightUpdateError(
                "holds values that are not finite",
                field=name,
                received=f"{int((~torch.isfinite(tensor)).sum())} of {tensor.numel()}",
                fix="publish a version from before the training diverged",
            )
