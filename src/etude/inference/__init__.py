"""Inference: the engine, and the service through which many sessions share it.

Names are imported lazily: the engine imports torch, which the router and the load generator below this
package do not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.inference.cache import page_bytes as page_bytes
    from etude.inference.cache import pages_for as pages_for
    from etude.inference.engine import Engine as Engine
    from etude.inference.mtp import MtpDrafts as MtpDrafts
    from etude.inference.mtp import choose_drafts as choose_drafts
    from etude.inference.sequences import Answer as Answer
    from etude.inference.service import EngineService as EngineService
    from etude.inference.speculation import NgramLookup as NgramLookup
    from etude.inference.times import EngineCounters as EngineCounters
    from etude.inference.times import ServiceTimes as ServiceTimes
    from etude.inference.times import StepSums as StepSums

_MODULES = {
    "Answer": "sequences",
    "Engine": "engine",
    "EngineCounters": "times",
    "EngineService": "service",
    "MtpDrafts": "mtp",
    "choose_drafts": "mtp",
    "NgramLookup": "speculation",
    "ServiceTimes": "times",
    "StepSums": "times",
    "page_bytes": "cache",
    "pages_for": "cache",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
