"""The report of a run: figures as PNG files and one self-contained HTML page. Needs matplotlib."""

from etude.observe.report.page import build_report as build_report
from etude.observe.report.summary import Comparison as Comparison
from etude.observe.report.summary import Estimate as Estimate
from etude.observe.report.summary import Suggestion as Suggestion
from etude.observe.report.summary import behaviour_comparisons as behaviour_comparisons
from etude.observe.report.summary import headline as headline
from etude.observe.report.summary import next_steps as next_steps
from etude.observe.report.summary import results_comparisons as results_comparisons
