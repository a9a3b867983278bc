"""Counters and latencies of a server as Prometheus text, without a library for it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the latency histogram's buckets."""

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counts and times of one server, for one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._buckets: dict[Labels, list[int]] = {}
        self._sums: Counter[Labels] = Counter()

    def count(self, name: str, num: int = 1, **labels: str) -> None:
        """Adds to a counter."""
        self._counts[name, tuple(sorted(labels.items()))] += num

    def observe(self, seconds: float, **labels: str) -> None:
        """Adds one request's duration to the latency histogram."""
        key = tuple(sorted(labels.items()))
        buckets = self._buckets.setdefault(key, [0] * (len(BUCKETS_S) + 1))
        buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self._sums[key] += seconds  # type: ignore[assignment]

    def text(self, gauges: Mapping[tuple[str, Labels], float]) -> str:
        """Everything in Prometheus' text format; `gauges`: what is read at this moment."""
        lines: list[str] = []
        lines += _families("counter", {(f"{n}_total", labels): c for (n, labels), c in self._counts.items()})
        lines += _families("gauge", gauges)
        if self._buckets:
            lines.append("# TYPE etude_sandbox_request_seconds histogram")
        for labels, buckets in sorted(self._buckets.items()):
            lines += self._histogram(labels, buckets)
        return "\n".join(lines) + "\n"

    def _histogram(self, labels: Labels, buckets: list[int]) -> Iterable[str]:
        name, total = "etude_sandbox_request_seconds", 0
        for end_s, num in zip((*BUCKETS_S, float("inf")), buckets, strict=True):
            total += num
            end = "+Inf" if end_s == float("inf") else f"{end_s:g}"
            yield f"{name}_bucket{_braces((*labels, ('le', end)))} {total}"
        yield f"{name}_sum{_braces(labels)} {self._sums[labels]:.6f}"
        yield f"{name}_count{_braces(labels)} {total}"


def _families(kind: str, values: Mapping[tuple[str, Labels], float]) -> Iterable[str]:
    """Lines of one kind, each name's together below its type."""
    last = ""
    for (name, labels), value in sorted(values.items()):
        if name != last:
            yield f"# TYPE {name} {kind}"
            last = name
        yield f"{name}{_braces(labels)} {value:g}"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
