"""The counters of an environment server."""

from __future__ import annotations

from collections.abc import Mapping

from etude.sandbox.server.metrics import Labels, Metrics


class EnvironmentMetrics(Metrics):
    """As a sandbox server's, under names of its own."""

    def text(self, gauges: Mapping[tuple[str, Labels], float]) -> str:
        """See Metrics.text."""
        # The class above and its middleware name what they count themselves after sandboxes.
        return super().text(gauges).replace("etude_sandbox_", "etude_environment_")
