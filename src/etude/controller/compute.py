"""What computes on this machine: the device, the number format, threads (more are not always faster) and the
engine's kernels.

All of them decide the last bits of a run, so a run keeps what it was begun with.
"""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from etude.config import ModelConfig, RunConfig
from etude.errors import ConfigError, ResourceError
from etude.inference.engine import Kernels
from etude.inference.native import load_library
from etude.model import LanguageModel, PackedAttention
from etude.observe import Observer, RunDirectory
from etude.observe.machine import available_memory_bytes

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
AnyModule = TypeVar("AnyModule", bound=nn.Module)

_PROBE_TOKENS, _PROBE_LENGTH = 1920, 160  # of a training step that is timed, and of its longest sequence


def settle_compute(run: RunDirectory, config: RunConfig, observer: Observer) -> RunConfig:
    """The configuration with device, number format, threads and kernels settled: as configured, else as the
    run was begun with, else as they suit this machine. Sets the compute threads and stores all with the run.

    Raises ResourceError for a GPU or for kernels that are asked for, or that the run was begun with, and
    cannot be had; ConfigError for a number format that the device does not compute in.
    """
    device, dtype, kernels = _as_begun(run, config)
    place = choose_place(device, dtype, kernels, config.numerics, observer)
    threads = _begun_threads(run, config, place.device)
    settled = {"device": place.device, "dtype": place.dtype, "kernels": place.kernels}
    run.update_environment({**settled, "compute_threads": threads})
    return _settled(config, place, threads)


def settle_evaluation(run: RunDirectory) -> RunConfig:
    """As `settle_compute`, for judging a run's policies: stores nothing, and where the run's device or
    kernels cannot be had, others do."""
    config = run.config
    wanted, dtype, kernels = _as_begun(run, config)
    device = choose_device("cpu" if wanted == "cpu" else "auto", config.numerics)
    dtype = dtype if wanted in (device, "auto") else "auto"
    kernels = "eager" if kernels == "eager" and device == "cpu" else "auto"
    place = choose_place(device, dtype, kernels, config.numerics)
    return _settled(config, place, _begun_threads(run, config, place.device))


def _as_begun(run: RunDirectory, config: RunConfig) -> tuple[str, str, str]:
    """Device, number format and kernels as configured, else as the run was begun with, else `auto`."""
    begun = run.environment
    old_device = "cpu" if "kernels" in begun else "auto"  # runs from before there was a choice had the CPU
    pairs = (
        (config.device, begun.get("device", old_device)),
        (config.dtype, begun.get("dtype", "auto")),
        (config.engine.kernels, begun.get("kernels", "auto")),
    )
    device, dtype, kernels = (before if now == "auto" else now for now, before in pairs)
    return device, dtype, kernels


def _begun_threads(run: RunDirectory, config: RunConfig, device: Device) -> int:
    """Sets and returns the compute threads: as configured, as the run was begun with, or the fastest."""
    configured = config.num_threads or int(run.environment.get("compute_threads") or 0)
    if device == "cuda" and not configured:
        return torch.get_num_threads()
    return choose_threads(configured, config.model, config.tokenizer.vocab_size)


def _settled(config: RunConfig, place: Place, threads: int) -> RunConfig:
    engine = config.engine.model_copy(update={"kernels": place.kernels})
    update = {"device": place.device, "dtype": place.dtype, "num_threads": threads, "engine": engine}
    return config.model_copy(update=update)


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how an engine computes."""

    device: Device
    dtype: Dtype
    kernels: Kernels

    @property
    def element_bytes(self) -> int:
        """Of one number of weights, keys and values."""
        return 2 if self.dtype == "bfloat16" else 4


def choose_place(
    device: str = "auto",
    dtype: str = "auto",
    kernels: str = "auto",
    numerics: str = "fast",
    observer: Observer | None = None,
) -> Place:
    """What is configured (see RunConfig and EngineConfig), with open choices made to fit together and this
    machine. Raises ResourceError for what cannot be had here, ConfigError for what does not fit."""
    if device == "auto" and kernels in ("eager", "native"):
        device = "cpu"
    chosen = choose_device(device, numerics)
    return Place(chosen, choose_dtype(dtype, chosen), choose_kernels(kernels, observer, chosen))


def choose_weight_dtype(configured: str, place: Place) -> Dtype:
    """The number format of the engine's matrices (see EngineConfig). Raises ConfigError for another one than
    the model's where the kernels are not native."""
    if configured == "auto":
        return place.dtype
    if place.kernels != "native" and configured != place.dtype:
        raise ConfigError(
            f"the {place.kernels} kernels keep weights as the model has them",
            field="engine.weight_dtype",
            received=configured,
            fix="leave it at auto" + ("" if place.device == "cpu" else ", and set dtype"),
        )
    return "bfloat16" if configured == "bfloat16" else "float32"


def free_memory_bytes(model: nn.Module, place: Place) -> int:
    """Memory that is left for keys and values of an engine yet to be made, which will hold the weights of
    `model` twice: those in service, and the next ones beside them."""
    if place.device == "cpu":
        return available_memory_bytes()
    weights = sum(parameter.numel() for parameter in model.parameters()) * place.element_bytes
    return max(0, torch.cuda.mem_get_info()[0] - 2 * weights)


def choose_device(configured: str, numerics: str = "fast") -> Device:
    """`cuda` if it is asked for, or the choice is open and it can be had. Raises ResourceError where it
    cannot, ConfigError for numerics that it does not have."""
    if configured == "cpu" or (configured == "auto" and numerics == "invariant"):
        return "cpu"
    if numerics == "invariant":
        raise ConfigError(
            "batch-invariant numerics are the CPU's",
            field="device",
            received=configured,
            fix='set device="cpu", or numerics="fast"',
        )
    missing = _missing_for_cuda()
    if missing is None:
        return "cuda"
    if configured == "auto":
        return "cpu"
    raise ResourceError(missing, field="device", received=configured, fix='set device="cpu"')


def _missing_for_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU here"
    if importlib.util.find_spec("triton") is None:
        return "Triton is missing, in which the kernels for GPUs are written"
    return None


def choose_dtype(configured: str, device: Device) -> Dtype:
    """The number format of weights, keys and values. Raises ConfigError for one that the device does not
    have."""
    if device == "cpu":
        if configured == "bfloat16":
            raise ConfigError(
                "weights are float32 on a CPU", field="dtype", received=configured, fix='set dtype="float32"'
            )
        return "float32"
    return "float32" if configured == "float32" else "bfloat16"


def choose_kernels(
    configured: str,
    observer: Observer | None = None,
    device: Device = "cpu",
) -> Kernels:
    """`gpu` on a GPU; `native` where it compiles, if the choice is open; says why not.

    Raises ResourceError if it must be `native` and does not compile, ConfigError for kernels of another
    device.
    """
    if (configured == "gpu") != (device == "cuda") and configured != "auto":
        raise ConfigError(
            f"these kernels do not compute on the device {device!r}",
            field="engine.kernels",
            received=configured,
            fix='set engine.kernels="auto", or another device',
        )
    if device == "cuda":
        return "gpu"
    if configured == "eager":
        return "eager"
    try:
        load_library()
    except ResourceError as error:
        if configured == "native":
            raise
        if observer is not None:
            observer.say(f"sampling operator by operator, which is several times slower: {error}")
        return "eager"
    return "native"


def place_model(model: AnyModule, config: RunConfig) -> AnyModule:
    """Brings a model to be trained to the device of a settled configuration, in its number format, and gives
    it the device's arithmetic and, if wanted, activation checkpointing. Changes the model in place, and
    returns it."""
    if isinstance(model, LanguageModel):
        model.checkpoint_activations(config.activation_checkpointing)
    if config.device != "cuda":
        return model
    model.to("cuda")
    if isinstance(model, LanguageModel):
        from etude.model.kernels.gpu.ops import GpuOps

        model.ops = GpuOps()
        if config.dtype == "bfloat16":
            model.cast(torch.bfloat16)
    elif config.dtype == "bfloat16":
        model.to(torch.bfloat16)
    return model


def choose_threads(configured: int, model: ModelConfig, vocab_size: int) -> int:
    """Sets and returns the number of compute threads; 0 probes a training step at 1, 2, 4, ... cores."""
    if configured:
        torch.set_num_threads(configured)
        return configured
    cores = len(os.sched_getaffinity(0))
    candidates = [count for count in (1, 2, 4, 8, 16) if count <= cores]
    probe = LanguageModel(model, vocab_size)
    probe.initialise(0)
    times = {count: _time_step(probe, count) for count in candidates}
    best = min(times, key=lambda count: times[count])
    torch.set_num_threads(best)
    return best


def use_sampling_threads(config: RunConfig) -> None:
    """Sets the compute threads for stages that sample. Training calls bring their own count."""
    if config.engine.num_threads:
        torch.set_num_threads(config.engine.num_threads)


def _time_step(model: LanguageModel, num_threads: int, repeats: int = 4) -> float:
    torch.set_num_threads(num_threads)
    length = min(_PROBE_LENGTH, model.config.max_positions)
    lengths = [length] * (_PROBE_TOKENS // length)
    tokens = torch.arange(sum(lengths)) % model.vocab_size
    positions = torch.arange(length).repeat(len(lengths))
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        hidden = model(tokens, positions, PackedAttention(lengths))
        model.logits(hidden).logsumexp(-1).mean().backward()
        times.append(time.perf_counter() - began)
    return min(times)
