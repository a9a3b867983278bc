"""The report of a load: rates, percentiles, cache hits, errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from benchmarks.load.runner import TurnRecord


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a duration, in seconds. NaN if nothing was measured."""

    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Measurements of one run of the load generator."""

    wall_s: float
    """From the first request to the end of the last answer."""
    sessions: int
    turns: int
    """Turns sent, including those with an error."""
    prompt_tokens: int
    """Input tokens of answered turns, cached or not."""
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Input and output tokens, including cached ones."""
    turns_per_s: float
    first_token: Percentiles
    inter_token: Percentiles
    latency: Percentiles
    """Latency of whole turns."""
    cache_hit_rate: float | None
    """Share of input tokens that were cached; None if the target does not report it."""
    errors: dict[str, int]
    """Error code -> number of turns."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a figure that was not measured is null."""
        return _plain(asdict(self))


def summarise(records: Sequence[TurnRecord]) -> LoadReport:
    """The report of a run's records."""
    whole = [record for record in records if not record.error]
    prompt = sum(record.prompt_tokens for record in whole)
    output = sum(record.output_tokens for record in whole)
    wall_s = max((r.done_s for r in records), default=0.0) - min((r.sent_s for r in records), default=0.0)
    per_s = 1.0 / wall_s if wall_s > 0.0 else 0.0
    reported = [record for record in whole if record.cached_tokens is not None]
    first = [t for record in whole if (t := record.first_token_s) is not None]
    return LoadReport(
        wall_s=wall_s,
        sessions=len({record.session for record in records}),
        turns=len(records),
        prompt_tokens=prompt,
        output_tokens=output,
        output_tokens_per_s=output * per_s,
        total_tokens_per_s=(prompt + output) * per_s,
        turns_per_s=len(whole) * per_s,
        first_token=_percentiles(first),
        inter_token=_percentiles([gap for record in whole for gap in record.gaps_s()]),
        latency=_percentiles([record.latency_s for record in whole]),
        cache_hit_rate=(
            sum(r.cached_tokens or 0 for r in reported) / max(1, sum(r.prompt_tokens for r in reported))
            if reported
            else None
        ),
        errors=dict(Counter(record.error for record in records if record.error)),
    )


def _percentiles(values: Sequence[float]) -> Percentiles:
    if not values:
        return Percentiles(*[float("nan")] * 4)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Percentiles(p50, p90, p99, float(np.mean(values)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and np.isnan(value) else value
