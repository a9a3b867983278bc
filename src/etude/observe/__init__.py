"""The output of a run: its directory, metrics, progress, machine description and behaviour statistics.

The report is in `etude.observe.report`, which alone needs matplotlib.
"""

from etude.observe.behaviour import summarize_behaviour as summarize_behaviour
from etude.observe.drift import MonitoredSink as MonitoredSink
from etude.observe.machine import commit as commit
from etude.observe.machine import describe_machine as describe_machine
from etude.observe.machine import versions as versions
from etude.observe.metrics import JsonlSink as JsonlSink
from etude.observe.metrics import MemorySink as MemorySink
from etude.observe.metrics import MetricRow as MetricRow
from etude.observe.metrics import MetricSink as MetricSink
from etude.observe.metrics import read_metrics as read_metrics
from etude.observe.observer import Observer as Observer
from etude.observe.observer import RecordingObserver as RecordingObserver
from etude.observe.observer import SilentObserver as SilentObserver
from etude.observe.observer import show_stage as show_stage
from etude.observe.run_directory import RunDirectory as RunDirectory
from etude.observe.voided import cause_of as cause_of
from etude.observe.voided import shares_by_cause as shares_by_cause
from etude.observe.voided import summarize_voided as summarize_voided
