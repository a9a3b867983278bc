"""The counters of an environment server."""

from __future__ import annotations

from collections.abc import Mapping

from etude.errors import AgentError, UserError
from etude.sandbox.errors import CapacityError, SandboxMissingError, SandboxStateError
from etude.sandbox.server.metrics import Labels, Metrics

_REFUSALS = (CapacityError, SandboxMissingError, SandboxStateError)
_REFUSED = {"session", "sessions", "snapshot", "calls", "kept_bytes", "episode_id", "environment.server"}
"""Fields of this server's own refusals: a limit of the tenant's, a session that it has ended. The same kinds
with other fields come from the sandboxes behind."""


class EnvironmentMetrics(Metrics):
    """As a sandbox server's, under names of its own."""

    def text(self, gauges: Mapping[tuple[str, Labels], float]) -> str:
        """See Metrics.text."""
        # The class above and its middleware name what they count themselves after sandboxes.
        return super().text(gauges).replace("etude_sandbox_", "etude_environment_")


def is_our_fault(error: BaseException) -> bool:
    """Whether an operator should hear of a failure: the infrastructure's, or a defect of the server."""
    if isinstance(error, _REFUSALS):
        return error.field not in _REFUSED
    return not isinstance(error, (UserError, AgentError))
