"""What the server counts and times, as Prometheus text, without a library for it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper ends of the buckets for whole waits."""
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper ends of the buckets for the time from token to token."""

_HISTOGRAMS: Mapping[str, tuple[tuple[float, ...], str]] = {
    "etude_serve_time_to_first_token_seconds": (LATENCY_S, "From the request's arrival to its first token."),
    "etude_serve_inter_token_seconds": (STEP_S, "From token to token of one answer."),
    "etude_serve_request_seconds": (LATENCY_S, "From the request's arrival to the end of its answer."),
}
_COUNTERS: Mapping[str, str] = {
    "etude_serve_requests_total": "Requests that were answered, by endpoint and status.",
    "etude_serve_prompt_tokens_total": "Tokens of prompts, cached ones included.",
    "etude_serve_cached_tokens_total": "Tokens of prompts that were not computed again.",
    "etude_serve_sampled_tokens_total": "Tokens sampled.",
    "etude_serve_aborted_total": "Requests whose client left before the answer was complete.",
    "etude_serve_engine_failures_total": "Requests that failed by no fault of their client's.",
    "etude_serve_weight_updates_total": "Versions put into service.",
}

Labels = tuple[tuple[str, str], ...]


class ServeMetrics:
    """Counts and times of one server, for one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._buckets = {name: [0] * (len(ends) + 1) for name, (ends, _) in _HISTOGRAMS.items()}
        self._sums = dict.fromkeys(_HISTOGRAMS, 0.0)

    def count(self, name: str, num: int = 1, **labels: str) -> None:
        """Adds to the counter `etude_serve_{name}_total`."""
        full = f"etude_serve_{name}_total"
        assert full in _COUNTERS, f"the counter {full} is not described"
        self._counts[full, tuple(sorted(labels.items()))] += num

    def observe(self, name: str, seconds: float, num: int = 1) -> None:
        """Adds `num` times of `seconds` each to the histogram `etude_serve_{name}_seconds`."""
        full = f"etude_serve_{name}_seconds"
        self._buckets[full][bisect_left(_HISTOGRAMS[full][0], seconds)] += num
        self._sums[full] += seconds * num

    def total(self, name: str) -> int:
        """A counter's value, all labels together."""
        return sum(num for (full, _), num in self._counts.items() if full == f"etude_serve_{name}_total")

    def text(self, gauges: Mapping[str, float]) -> str:
        """Everything in Prometheus' text format; `gauges`: what is read at this moment."""
        lines = [*self._counter_lines()]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value:.15g}"]
        for name, (ends, words) in _HISTOGRAMS.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} histogram"]
            lines += _bucket_lines(name, ends, self._buckets[name], self._sums[name])
        return "\n".join(lines) + "\n"

    def _counter_lines(self) -> Iterator[str]:
        for name, words in _COUNTERS.items():
            yield f"# HELP {name} {words}"
            yield f"# TYPE {name} counter"
            rows = sorted((labels, num) for (full, labels), num in self._counts.items() if full == name)
            for labels, num in rows or [((), 0)]:
                shown = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels)
                yield f"{name}{{{shown}}} {num}" if shown else f"{name} {num}"


def _bucket_lines(name: str, ends: tuple[float, ...], buckets: list[int], total_s: float) -> Iterator[str]:
    count = 0
    for end, num in zip((*(f"{end:g}" for end in ends), "+Inf"), buckets, strict=True):
        count += num
        yield f'{name}_bucket{{le="{end}"}} {count}'
    yield f"{name}_sum {total_s:.6f}"
    yield f"{name}_count {count}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
