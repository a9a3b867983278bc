"""Counters, gauges and histograms of a server in Prometheus' text format."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate
from types import SimpleNamespace

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Default upper bounds of a histogram's buckets."""

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """The counters and histograms of one server, for one event loop."""

    def __init__(
        self,
        server: str = "etude",
        counters: Mapping[str, str] | None = None,
        histograms: Mapping[str, tuple[tuple[float, ...], str]] | None = None,
    ) -> None:
        """`server`: prefix of the middleware's metrics. `counters`: descriptions by name, shown from the
        start. `histograms`: upper bounds of the buckets and description by name."""
        self.server = server
        self._histograms = dict(histograms or {})
        self._words = {**(counters or {}), **{name: words for name, (_, words) in self._histograms.items()}}
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._times: dict[tuple[str, Labels], tuple[list[int], list[float]]] = {}
        for name in counters or {}:
            self._counts[name, ()] = 0
        for name in self._histograms:
            self.observe(name, 0.0, 0)

    def count(self, name: str, num: int = 1, **labels: str) -> None:
        """Adds to the counter `{name}_total`."""
        self._counts[name, tuple(sorted(labels.items()))] += num

    def observe(self, name: str, seconds: float, num: int = 1, **labels: str) -> None:
        """Adds `num` observations of `seconds` each to the histogram `name`."""
        ends = self._ends(name)
        key = name, tuple(sorted(labels.items()))
        buckets, total_s = self._times.setdefault(key, ([0] * (len(ends) + 1), [0.0]))
        buckets[bisect_left(ends, seconds)] += num
        total_s[0] += seconds * num

    def total(self, name: str) -> int:
        """A counter's value, summed over all labels."""
        return sum(num for (known, _), num in self._counts.items() if known == name)

    def text(
        self,
        gauges: Mapping[tuple[str, Labels], float] | Mapping[str, float] | None = None,
        is_shown: Callable[[Labels], bool] = lambda labels: True,
    ) -> str:
        """All metrics in Prometheus' text format; `gauges`: values read now, by name, or by name and labels.
        `is_shown`: filters counters by their labels."""
        # Imported here because engines without a server also use this class.
        from prometheus_client import Metric, generate_latest

        families: dict[str, Metric] = {}

        def add(kind: str, family: str, labels: Labels, value: float, suffix: str = "") -> None:
            words = self._words.get(family, "")
            metric = families.setdefault(family, Metric(family, words, kind))
            metric.add_sample(family + suffix, dict(labels), value)

        labelled = {name for (name, labels), _ in self._counts.items() if labels}
        for (name, labels), num in sorted(self._counts.items()):
            if (labels or name not in labelled) and is_shown(labels):
                add("counter", name, labels, num, "_total")
        for key, value in sorted((gauges or {}).items()):
            name, labels = (key, ()) if isinstance(key, str) else key
            add("gauge", name, labels, value)
        for (name, labels), (buckets, total_s) in sorted(self._times.items()):
            for end, num in zip((*self._ends(name), math.inf), accumulate(buckets), strict=True):
                written = "+Inf" if end == math.inf else f"{end:g}"
                add("histogram", name, (*labels, ("le", written)), num, "_bucket")
            add("histogram", name, labels, total_s[0], "_sum")
            add("histogram", name, labels, sum(buckets), "_count")
        return generate_latest(SimpleNamespace(collect=families.values)).decode()  # type: ignore[arg-type]

    def _ends(self, name: str) -> tuple[float, ...]:
        return self._histograms[name][0] if name in self._histograms else LATENCY_S
