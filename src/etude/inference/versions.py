"""Which policy versions answer a request."""

from __future__ import annotations

from etude.records import PolicyVersion


def serves(current: PolicyVersion | None, wanted: PolicyVersion, wanted_is_minimum: bool) -> bool:
    """Whether `current` answers a request for exactly `wanted`, or for that or a later one of its lineage.

    A wanted version without a digest stands for any weights of its lineage and step.
    """
    if current is None or current.lineage != wanted.lineage:
        return False
    if current.step == wanted.step:
        return wanted.digest in ("", current.digest)
    return wanted_is_minimum and current.step > wanted.step
