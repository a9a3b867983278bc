"""What all hosts of a fleet can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from etude.sandbox.types import Capabilities

Isolation = Literal["none", "namespaces", "gvisor", "container", "vm"]

_ISOLATION: tuple[Isolation, ...] = ("none", "namespaces", "container", "gvisor", "vm")
"""Weakest first."""


def common_capabilities(hosts: Sequence[Capabilities]) -> Capabilities:
    """The weakest isolation, and only what every host offers."""
    forks = {host.fork for host in hosts}
    moves = {host.migrate for host in hosts}
    weakest = _ISOLATION[min(_ISOLATION.index(host.isolation) for host in hosts)]
    return Capabilities(
        backend="fleet",
        isolation=weakest,
        commands=all(host.commands for host in hosts),
        network=all(host.network for host in hosts),
        images=all(host.images for host in hosts),
        snapshots=frozenset.intersection(*(host.snapshots for host in hosts)),
        pause=frozenset.intersection(*(host.pause for host in hosts)),
        fork=None if None in forks else "full" if forks == {"full"} else "filesystem",
        migrate=None if None in moves else "live" if moves == {"live"} else "filesystem",
    )
