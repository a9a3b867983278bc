"""What the server counts and times."""

from __future__ import annotations

from collections.abc import Mapping

from etude.serving.metrics import Metrics

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
    "etude_serve_requests": "Requests that were answered, by endpoint and status.",
    "etude_serve_prompt_tokens": "Tokens of prompts, cached ones included.",
    "etude_serve_cached_tokens": "Tokens of prompts that were not computed again.",
    "etude_serve_sampled_tokens": "Tokens sampled.",
    "etude_serve_aborted": "Requests whose client left before the answer was complete.",
    "etude_serve_engine_failures": "Requests that failed by no fault of their client's.",
    "etude_serve_weight_updates": "Versions put into service.",
}


def serve_metrics() -> Metrics:
    """Counts and times of one inference server."""
    return Metrics("etude_serve", _COUNTERS, _HISTOGRAMS)
