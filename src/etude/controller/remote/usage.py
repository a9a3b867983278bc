"""What engine processes have done: counted there, told here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.inference.counters import EngineCounters
from etude.inference.times import ServiceTimes


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine process has done since it began."""

    counters: EngineCounters
    times: ServiceTimes


NO_USAGE = Usage(EngineCounters(), ServiceTimes())


def sum_usage(all_of: Sequence[Usage]) -> Usage:
    """What several engine processes have done together; the longest swap is the longest of any."""
    counters, times = EngineCounters(), ServiceTimes()
    for one in all_of:
        _add(counters, one.counters)
        longest = max(times.longest_swap_s, one.times.longest_swap_s)
        _add(times, one.times)
        times.longest_swap_s = longest
    return Usage(counters, times)


def _add(total: Any, more: Any) -> None:
    """Adds field by field, into nested ones."""
    for name in type(total).__dataclass_fields__:
        value = getattr(total, name)
        if hasattr(value, "__dataclass_fields__"):
            _add(value, getattr(more, name))
        else:
            setattr(total, name, value + getattr(more, name))
