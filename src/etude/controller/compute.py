"""Compute settings on this machine: device, number format, threads, memory and the engine's kernels.

Device, number format and kernels determine a run's results bit for bit, so a resumed run keeps them.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from etude.config import RunConfig
from etude.errors import ConfigError, ResourceError
from etude.inference.engine import Kernels
from etude.model import LanguageModel
from etude.model.kernels.invariant import InvariantOps
from etude.model.kernels.native import load_library
from etude.model.kernels.native import load_library as load_invariant_kernels
from etude.model.loading import AnyModel
from etude.observe import Observer, RunDirectory
from etude.observe.machine import available_cores, available_memory_bytes

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
AnyModule = TypeVar("AnyModule", bound=nn.Module)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_KEPT_BYTES = 1 << 25  # more is refused by some versions
_KEPT_BYTES = 1 << 30


def resolve_compute(run: RunDirectory, config: RunConfig, observer: Observer) -> RunConfig:
    """The configuration with device, number format and kernels resolved: as configured, else as the run was
    begun with, else as suits this machine. Stores them with the run, sets the compute threads, and makes the
    process keep freed memory.

    Raises ResourceError for a GPU or kernels that are configured, or that the run was begun with, and are not
    available; ConfigError for a number format that the device does not support.
    """
    device, dtype, kernels = _as_begun(run, config)
    place = choose_place(device, dtype, kernels, config.numerics, observer)
    threads = set_threads(config.num_threads, place.device)
    keep_freed_memory()
    resolved = {"device": place.device, "dtype": place.dtype, "kernels": place.kernels}
    run.update_environment({**resolved, "compute_threads": threads})
    return _with_place(config, place)


def resolve_evaluation(run: RunDirectory, config: RunConfig | None = None) -> RunConfig:
    """As `resolve_compute`, for evaluating a run's policies: stores nothing, and replaces the run's device or
    kernels where they are not available. `config`: replaces the run's own."""
    config = config or run.config
    wanted, dtype, kernels = _as_begun(run, config)
    device = choose_device("cpu" if wanted == "cpu" else "auto", config.numerics)
    dtype = dtype if wanted in (device, "auto") else "auto"
    kernels = "eager" if kernels == "eager" and device == "cpu" else "auto"
    place = choose_place(device, dtype, kernels, config.numerics)
    set_threads(config.num_threads, place.device)
    return _with_place(config, place)


def _as_begun(run: RunDirectory, config: RunConfig) -> tuple[str, str, str]:
    """Device, number format and kernels as configured, else as the run was begun with, else `auto`."""
    begun = run.environment
    pairs = (
        (config.device, begun.get("device", "auto")),
        (config.dtype, begun.get("dtype", "auto")),
        (config.engine.kernels, begun.get("kernels", "auto")),
    )
    device, dtype, kernels = (before if now == "auto" else now for now, before in pairs)
    return device, dtype, kernels


def _with_place(config: RunConfig, place: Place) -> RunConfig:
    engine = config.engine.model_copy(update={"kernels": place.kernels})
    return config.model_copy(update={"device": place.device, "dtype": place.dtype, "engine": engine})


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how an engine computes."""

    device: Device
    dtype: Dtype
    kernels: Kernels

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of weights, keys and values."""
        return 2 if self.dtype == "bfloat16" else 4


def choose_place(
    device: str = "auto",
    dtype: str = "auto",
    kernels: str = "auto",
    numerics: str = "fast",
    observer: Observer | None = None,
) -> Place:
    """The configured device, number format and kernels (see RunConfig and EngineConfig), with `auto` resolved
    for this machine. Raises ResourceError for unavailable ones, ConfigError for ones that do not fit."""
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
            f"the {place.kernels} kernels keep weights in the model's number format",
            field="engine.weight_dtype",
            received=configured,
            fix="leave it at auto" + ("" if place.device == "cpu" else ", and set dtype"),
        )
    return "bfloat16" if configured == "bfloat16" else "float32"


def free_memory_bytes(model: nn.Module, place: Place) -> int:
    """Memory available for the KV cache of an engine that is not made yet, and that will hold the weights of
    `model` twice: those in service and the next ones."""
    if place.device == "cpu":
        return available_memory_bytes()
    weights = sum(parameter.numel() for parameter in model.parameters()) * place.element_bytes
    return max(0, torch.cuda.mem_get_info()[0] - 2 * weights)


def choose_device(configured: str, numerics: str = "fast") -> Device:
    """`cuda` if it is configured, or for `auto` if it is available. Raises ResourceError where it is not,
    ConfigError for numerics that it does not support."""
    if configured == "cpu" or (configured == "auto" and numerics == "invariant"):
        return "cpu"
    if numerics == "invariant":
        raise ConfigError(
            "batch-invariant numerics work only on the CPU",
            field="device",
            received=configured,
            fix='set device="cpu", or numerics="fast"',
        )
    if not torch.cuda.is_available():
        missing = "PyTorch finds no GPU on this machine"
    elif importlib.util.find_spec("triton") is None:
        missing = "the package triton is missing, which the GPU kernels need"
    else:
        return "cuda"
    if configured == "auto":
        return "cpu"
    raise ResourceError(missing, field="device", received=configured, fix='set device="cpu"')


def choose_dtype(configured: str, device: Device) -> Dtype:
    """The number format of weights, keys and values. Raises ConfigError if the device lacks it."""
    if device == "cpu":
        if configured == "bfloat16":
            raise ConfigError(
                "must be float32 on a CPU", field="dtype", received=configured, fix='set dtype="float32"'
            )
        return "float32"
    return "float32" if configured == "float32" else "bfloat16"


def choose_kernels(configured: str, observer: Observer | None = None, device: Device = "cpu") -> Kernels:
    """`gpu` on a GPU; for `auto` on a CPU `native` where it compiles; else reports why not, and `eager`.

    Raises ResourceError if `native` is configured and does not compile, ConfigError for kernels of another
    device.
    """
    if (configured == "gpu") != (device == "cuda") and configured != "auto":
        raise ConfigError(
            f"these kernels do not run on the device {device!r}",
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
            observer.say(f"sampling is several times slower, as native kernels cannot be used: {error}")
        return "eager"
    return "native"


def place_model(model: AnyModule, config: RunConfig) -> AnyModule:
    """Moves a model, in place, to the device and number format of a resolved configuration, with the device's
    operations and, if configured, activation checkpointing; returns it."""
    if isinstance(model, LanguageModel):
        model.checkpoint_activations(config.activation_checkpointing)
    if config.device != "cuda":
        return model
    if not (isinstance(model, LanguageModel) and model.unread):
        model.to("cuda")
    if isinstance(model, LanguageModel):
        from etude.model.kernels.gpu.ops import GpuOps

        model.ops = GpuOps()
        if config.dtype == "bfloat16":
            model.cast(torch.bfloat16)
    elif config.dtype == "bfloat16":
        model.to(torch.bfloat16)
    return model


def set_threads(configured: int, device: Device = "cpu") -> int:
    """Sets and returns the number of compute threads: as configured, else on a CPU one for each core. A stage
    of training may use fewer of them (`ThreadChoice`)."""
    cores = available_cores() if device == "cpu" else torch.get_num_threads()
    torch.set_num_threads(configured or cores)
    return torch.get_num_threads()


def keep_freed_memory() -> None:
    """Makes the GNU C library keep freed memory for reuse: it would return large tensors to the kernel, which
    clears their pages again at the next step. All threads share one arena: in arenas of their own, of 64 MB
    pieces, large tensors would leave much unused."""
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_M_ARENA_MAX, 1)


def use_sampling_threads(config: RunConfig) -> None:
    """Sets the compute threads for stages that sample. Calls of the trainer set their own number."""
    if config.engine.num_threads:
        torch.set_num_threads(config.engine.num_threads)


def resolve_numerics(config: RunConfig) -> RunConfig:
    """The configuration with the kernels that its numerics require.

    Raises ResourceError where batch-invariant ones cannot be compiled.
    """
    if config.numerics == "fast":
        return config
    load_invariant_kernels()
    engine = config.engine.model_copy(update={"kernels": "native"})
    return config.model_copy(update={"engine": engine})


def use_numerics(model: AnyModel, config: RunConfig) -> None:
    """Gives the trainer's model the operations that `config.numerics` names. Raises ResourceError."""
    if config.numerics == "invariant":
        assert isinstance(model, LanguageModel), "resolved: other architectures sample through vLLM"
        model.ops = InvariantOps()
