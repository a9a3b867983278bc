"""Checks before a run over Ray: the address answers, and the parts fit. Does not import Ray."""

from __future__ import annotations

import functools
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from etude.config import ClusterConfig
from etude.errors import ConfigError, ResourceError
from etude.protocols import Resources

_PROBE = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
ray.cluster_resources()
"""


def check_room(parts: Sequence[Resources], has: Mapping[str, float]) -> None:
    """Raises ResourceError where `has` (cores as CPU, GPUs as GPU, bytes as memory) is less than the parts
    need together."""
    needs = {"CPU": 0.0, "GPU": 0.0, "memory": 0.0}
    for part in parts:
        needs["CPU"] += part.num_cpus
        needs["GPU"] += part.num_gpus
        needs["memory"] += part.memory_bytes
    short = [name for name, number in needs.items() if number > has.get(name, 0.0) + 1e-9]
    if short:
        raise ResourceError(
            f"the parts need more {' and '.join(short)} than there is: {describe_parts(parts)}",
            field="cluster",
            received=", ".join(f"{name} {has.get(name, 0.0):g} of {needs[name]:g}" for name in short),
            fix="start more machines, or lower cluster.engines or what each part takes: "
            "cluster.trainer, cluster.engine, cluster.worker, cluster.evaluation",
        )


def check_address(settings: ClusterConfig) -> None:
    """Raises ConfigError, within about `connect_timeout_s`, unless a Ray of this version answers there."""
    host, _, port = settings.address.rpartition(":")
    fix = "start it with `ray start --head`, or leave cluster.address empty to start Ray here"
    refuse = functools.partial(ConfigError, field="cluster.address", received=settings.address)
    try:
        socket.create_connection((host, int(port)), settings.connect_timeout_s).close()
    except OSError as error:
        raise refuse(f"does not answer: {error}", fix=fix) from error
    # Ray itself waits for minutes, and ends the process, where something else answers.
    command = [sys.executable, "-c", _PROBE, settings.address]
    try:
        probe = subprocess.run(
            command, timeout=settings.connect_timeout_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise refuse(
            "something listens at this address, but does not answer like a Ray cluster",
            fix=f"{fix}, or raise cluster.connect_timeout_s",
        ) from None
    if probe.returncode:
        lines = probe.stderr.strip().splitlines() or [f"exit status {probe.returncode}"]
        raise refuse(f"cannot be joined: {lines[-1]}", fix=fix)


def bundle_of(wanted: Resources) -> dict[str, float]:
    """The bundle that Ray reserves for a part."""
    named = {"CPU": wanted.num_cpus, "GPU": wanted.num_gpus, "memory": float(wanted.memory_bytes)}
    # Ray refuses an empty bundle, so a part without needs reserves the smallest share of a core.
    return {name: number for name, number in named.items() if number} or {"CPU": 0.001}


def describe_parts(parts: Sequence[Resources]) -> str:
    """Names and resources of parts, for messages."""
    return ", ".join(f"{part.part or 'a part'} {json.dumps(bundle_of(part))}" for part in parts)
