"""Sampling: the engine, and the service that many sessions share.

Names are imported when they are first used: torch comes with the engine, and the router and the load
generator below this package need none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.inference.cache import page_bytes, pages_for
    from etude.inference.engine import Engine
    from etude.inference.mtp import MtpDrafts, choose_drafts
    from etude.inference.sequences import Answer
    from etude.inference.service import EngineService
    from etude.inference.speculation import NgramLookup
    from etude.inference.times import EngineCounters, EngineLoad, ServiceTimes, StepSums

_MODULES = {
    "Answer": "sequences",
    "Engine": "engine",
    "EngineCounters": "times",
    "EngineLoad": "times",
    "EngineService": "service",
    "MtpDrafts": "mtp",
    "choose_drafts": "mtp",
    "NgramLookup": "speculation",
    "ServiceTimes": "times",
    "StepSums": "times",
    "page_bytes": "cache",
    "pages_for": "cache",
}

__all__ = [
    "Answer",
    "Engine",
    "EngineCounters",
    "EngineLoad",
    "EngineService",
    "MtpDrafts",
    "NgramLookup",
    "ServiceTimes",
    "StepSums",
    "choose_drafts",
    "page_bytes",
    "pages_for",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
