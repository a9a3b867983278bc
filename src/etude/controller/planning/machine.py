"""Rates of a device: as configured, else measured here."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.config import RunConfig
from etude.observe.machine import available_memory_bytes

_SIDE = 1024
_COPIED_BYTES = 128 << 20
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Rates:
    """Memory and rates of one device."""

    memory_bytes: float
    flops_per_s: float
    """Rate of matrix products in the run's number format."""
    bytes_per_s: float
    """Memory bandwidth."""
    device: str
    measured: tuple[str, ...] = ()
    """Names of the figures that were measured here; the others are from the configuration."""


def measure_rates(config: RunConfig, device: torch.device, dtype: torch.dtype) -> Rates:
    """The figures of `[plan]`, and measurements on this machine's `device` for those that are 0."""
    plan = config.plan
    figures = {
        "memory": (plan.device_memory_gb * 1e9, lambda: memory_bytes(device)),
        "products": (plan.peak_tflops * 1e12, lambda: _product_rate(device, dtype)),
        "bandwidth": (plan.bandwidth_gb_per_s * 1e9, lambda: _copy_rate(device)),
    }
    measured = tuple(name for name, (given, _) in figures.items() if not given)
    memory, products, bandwidth = (given or measure() for given, measure in figures.values())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
    return Rates(memory, products, bandwidth, "as supposed" if not measured else name, measured)


def memory_bytes(device: torch.device) -> float:
    """Free memory of a device now."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(available_memory_bytes())


def process_bytes() -> float:
    """Private memory of this process: an interpreter with the libraries that a run loads."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux, or not allowed
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    return float(next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    left = torch.randn(_SIDE, _SIDE, device=device, dtype=dtype)
    return 2.0 * _SIDE**3 / _fastest_s(lambda: left @ left, device)


def _copy_rate(device: torch.device) -> float:
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * _COPIED_BYTES / _fastest_s(lambda: target.copy_(source), device)


def _fastest_s(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
