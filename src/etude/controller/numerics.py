"""`numerics = "invariant"`: what it asks of the engine and of the trainer, and whether it can be had."""

from __future__ import annotations

from etude.config import RunConfig
from etude.model import LanguageModel
from etude.model.kernels.invariant import InvariantOps
from etude.model.kernels.native import load_library
from etude.model.loading import AnyModel


def settle_numerics(config: RunConfig) -> RunConfig:
    """The configuration with the kernels that its numerics ask for.

    Raises ResourceError where batch-invariant ones cannot be compiled.
    """
    if config.numerics == "fast":
        return config
    load_library()
    engine = config.engine.model_copy(update={"kernels": "native"})
    return config.model_copy(update={"engine": engine})


def use_numerics(model: AnyModel, config: RunConfig) -> None:
    """Gives the trainer's model the operations that `config.numerics` names. Raises ResourceError."""
    if config.numerics == "invariant":
        assert isinstance(model, LanguageModel), "settled: other architectures sample through vLLM"
        model.ops = InvariantOps()
