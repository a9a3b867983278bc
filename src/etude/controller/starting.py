"""What is looked at before a run has a directory."""

from __future__ import annotations

from etude.config import RunConfig
from etude.controller.compute import choose_device, choose_place, choose_weight_dtype
from etude.controller.models import settle_model
from etude.controller.numerics import settle_numerics
from etude.inference.vllm import check_vllm


def check_start(config: RunConfig) -> None:
    """Refuses, before a run directory is made, what would end the run at once. Raises ConfigError for an
    initial checkpoint that is none or does not fit, or for vLLM that is neither installed nor named,
    ResourceError for a device or for kernels that cannot be had."""
    config = settle_numerics(settle_model(config))
    if config.engine.backend == "vllm":
        check_vllm(config.engine.vllm)
        choose_device(config.device, config.numerics)
    else:
        place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
        choose_weight_dtype(config.engine.weight_dtype, place)
