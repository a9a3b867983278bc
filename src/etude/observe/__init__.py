"""What a run tells people and leaves behind: its directory, metrics, progress, machine and behaviour.

The report is in `etude.observe.report`, which alone needs matplotlib.
"""

from etude.observe.behaviour import summarize_behaviour
from etude.observe.drift import MonitoredSink
from etude.observe.machine import commit, describe_machine, versions
from etude.observe.metrics import (
    JsonlSink,
    MemorySink,
    MetricRow,
    MetricSink,
    read_metrics,
)
from etude.observe.observer import Observer, RecordingObserver, SilentObserver
from etude.observe.run_directory import RunDirectory
from etude.observe.voided import cause_of, shares_by_cause, summarize_voided

__all__ = [
    "JsonlSink",
    "MemorySink",
    "MetricRow",
    "MetricSink",
    "MonitoredSink",
    "Observer",
    "RecordingObserver",
    "RunDirectory",
    "SilentObserver",
    "cause_of",
    "commit",
    "describe_machine",
    "read_metrics",
    "shares_by_cause",
    "summarize_behaviour",
    "summarize_voided",
    "versions",
]
