"""Counters, gauges and histograms of a server in Prometheus' text format.

The only writer of that format: `prometheus_client` may replace what is inside of this class.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of a histogram's buckets, where no others are given."""

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counts and times of one server, for one event loop."""

    def __init__(
        self,
        server: str = "etude",
        counters: Mapping[str, str] | None = None,
        histograms: Mapping[str, tuple[tuple[float, ...], str]] | None = None,
    ) -> None:
        """`server`: prefix of what the middleware measures. `counters`: descriptions by name; these are shown
        from the start. `histograms`: upper ends of the buckets and description by name."""
        self.server = server
        self._counters = dict(counters or {})
        self._histograms = dict(histograms or {})
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._times: dict[tuple[str, Labels], tuple[list[int], list[float]]] = {}
        for name in self._counters:
            self._counts[name, ()] = 0
        for name in self._histograms:
            self.observe(name, 0.0, 0)

    def count(self, name: str, num: int = 1, **labels: str) -> None:
        """Adds to the counter `{name}_total`."""
        self._counts[name, tuple(sorted(labels.items()))] += num

    def observe(self, name: str, seconds: float, num: int = 1, **labels: str) -> None:
        """Adds `num` times of `seconds` each to the histogram `name`."""
        ends = self._ends(name)
        key = name, tuple(sorted(labels.items()))
        buckets, total_s = self._times.setdefault(key, ([0] * (len(ends) + 1), [0.0]))
        buckets[bisect_left(ends, seconds)] += num
        total_s[0] += seconds * num

    def total(self, name: str) -> int:
        """A counter's value, all labels together."""
        return sum(num for (known, _), num in self._counts.items() if known == name)

    def text(self, gauges: Mapping[tuple[str, Labels], float] | Mapping[str, float] | None = None) -> str:
        """Everything in Prometheus' text format; `gauges`: what is read at this moment, by name, or by name
        and labels."""
        labelled = {name for (name, labels), _ in self._counts.items() if labels}
        counts = {
            (f"{name}_total", labels): num
            for (name, labels), num in self._counts.items()
            if labels or name not in labelled
        }
        described = {f"{name}_total": words for name, words in self._counters.items()}
        lines = [*_family("counter", counts, described)]
        rows = {(key, ()) if isinstance(key, str) else key: value for key, value in (gauges or {}).items()}
        lines += _family("gauge", rows, {})
        last = ""
        for (name, labels), (buckets, total_s) in sorted(self._times.items()):
            if name != last:
                last = name
                words = self._histograms[name][1] if name in self._histograms else ""
                lines += _head(name, "histogram", words)
            count = 0
            for end, num in zip((*(f"{end:g}" for end in self._ends(name)), "+Inf"), buckets, strict=True):
                count += num
                lines.append(f"{name}_bucket{_braces((*labels, ('le', end)))} {count}")
            lines.append(f"{name}_sum{_braces(labels)} {total_s[0]:.6f}")
            lines.append(f"{name}_count{_braces(labels)} {count}")
        return "\n".join(lines) + "\n"

    def _ends(self, name: str) -> tuple[float, ...]:
        return self._histograms[name][0] if name in self._histograms else LATENCY_S


def _family(
    kind: str, values: Mapping[tuple[str, Labels], float], described: Mapping[str, str]
) -> Iterable[str]:
    """Lines of one kind, each name's together below its type."""
    last = ""
    for (name, labels), value in sorted(values.items()):
        if name != last:
            yield from _head(name, kind, described.get(name, ""))
            last = name
        yield f"{name}{_braces(labels)} {value:.15g}"


def _head(name: str, kind: str, words: str) -> list[str]:
    return [*([f"# HELP {name} {words}"] if words else []), f"# TYPE {name} {kind}"]


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
