"""`numerics = "invariant"`: what it asks of the engine and of the trainer, and whether it can be had."""

from __future__ import annotations

from etude.config import RunConfig
from etude.controller.compute import choose_kernels
from etude.errors import ResourceError
from etude.model import LanguageModel
from etude.model.kernels.invariant import InvariantOps
from etude.model.kernels.native import load_library
from etude.model.loading import AnyModel


def settle_numerics(config: RunConfig) -> RunConfig:
    """The configuration with the kernels that its numerics ask for.

    Raises ResourceError where batch-invariant ones cannot be compiled or do not compute the model.
    """
    if config.numerics == "fast":
        return config
    load_library()
    if choose_kernels("auto", model=config.model) != "native":
        raise ResourceError(
            "there are no batch-invariant kernels for this model",
            field="numerics",
            received=f"invariant, with model.architecture {config.model.architecture!r}",
            fix='set numerics="fast"; the parity gate then says how far trainer and engine are apart',
        )
    engine = config.engine.model_copy(update={"kernels": "native"})
    return config.model_copy(update={"engine": engine})


def use_numerics(model: AnyModel, config: RunConfig) -> None:
    """Gives the trainer's model the operations that `config.numerics` names. Raises ResourceError."""
    if config.numerics == "invariant":
        assert isinstance(model, LanguageModel), "settled: other architectures sample through vLLM"
        model.ops = InvariantOps()
