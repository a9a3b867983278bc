"""Creates the vLLM sampler that a run's configuration describes."""

from __future__ import annotations

from pathlib import Path

import torch

from etude.config.engine import VllmConfig
from etude.errors import ConfigError
from etude.inference.vllm.publishing import FetchedSnapshots
from etude.inference.vllm.replica import MOST_RESTARTS, Replica
from etude.inference.vllm.sampler import DRAIN_S, VllmSampler
from etude.inference.vllm.servers import (
    CPU_ARGUMENTS,
    CPU_ENVIRONMENT,
    ExternalServer,
    ManagedServer,
    VllmServer,
    no_interpreter,
)


def make_vllm_sampler(
    config: VllmConfig,
    *,
    routed: bool | None = None,
    dtype: str = "auto",
    max_tokens: int = 0,
    fetched: FetchedSnapshots | None = None,
    is_supervised: bool = False,
) -> VllmSampler:
    """A sampler that starts its server at the first `stage`; use it as an async context manager.

    `routed`: whether the model is a mixture of experts, whose routes are recorded; None if unknown (vLLM on a
    CPU then finds out). `dtype`: in which vLLM computes. `max_tokens`: longest session of a started server;
    0: the model's limit. `fetched`: fetches published weights to this machine; else manifests must name local
    directories. `is_supervised`: a supervisor restarts the whole sampler, so a server that has ended is not
    restarted here, and closing does not wait. Raises ConfigError.
    """
    check_vllm(config)
    has_routes = config.record_routes and routed is not False
    on_gpu = torch.cuda.is_available()
    length = ("--max-model-len", str(max_tokens)) if max_tokens else ()
    return VllmSampler(
        Replica(
            _server(
                config,
                ["--dtype", dtype, *length, *config.arguments],
                on_gpu=on_gpu,
                has_routes=has_routes and routed is True,
            ),
            # On GPUs vLLM records them itself, and sends them with its answers.
            capture_routes=has_routes and not (on_gpu and config.python),
            tolerance=config.probe_tolerance,
            most_restarts=0 if is_supervised else MOST_RESTARTS,
            fetched=fetched,
        ),
        drain_s=0.0 if is_supervised else DRAIN_S,
    )


def check_vllm(config: VllmConfig, *, is_here: bool = True) -> None:
    """Raises ConfigError unless the configuration names an existing vLLM. `is_here`: whether a server would
    be started on this machine."""
    if not config.python and not config.url:
        raise ConfigError(
            "neither an interpreter to start vLLM with nor the URL of a server is configured",
            field="engine.vllm.python",
            received="",
            fix="name the bin/python of vLLM's environment, or a server with engine.vllm.url",
        )
    if config.python and is_here and not Path(config.python).exists():
        raise no_interpreter(config.python)


def _server(config: VllmConfig, arguments: list[str], *, on_gpu: bool, has_routes: bool) -> VllmServer:
    key = Path(config.key_file).read_text(encoding="utf-8").strip() if config.key_file else ""
    if config.url:
        return ExternalServer(config.url, key, config.start_timeout_s)
    environment = dict(setting.split("=", 1) for setting in config.environment)
    if not on_gpu:
        arguments, environment = [*CPU_ARGUMENTS, *arguments], {**CPU_ENVIRONMENT, **environment}
    elif has_routes:
        arguments = ["--enable-return-routed-experts", *arguments]
    return ManagedServer(Path(config.python), arguments, environment, config.start_timeout_s)
