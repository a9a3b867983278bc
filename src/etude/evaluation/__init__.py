"""Benchmark suites, their statistics, and paired comparisons."""

from etude.evaluation.acting import ActingTasks, evaluate_family, evaluate_masked
from etude.evaluation.comparison import compare_results, compare_rows
from etude.evaluation.intervals import clopper_pearson, clustered_interval
from etude.evaluation.results import EvaluationResult, ModeResult
from etude.evaluation.sessions import Play, SessionRow, play_sessions, plays_of
from etude.evaluation.statistics import Prices, pass_at_k, session_figures, summarize
from etude.evaluation.suite import Evaluation, check_infrastructure, evaluate_policy, tasks_digest

__all__ = [
    "ActingTasks",
    "Evaluation",
    "EvaluationResult",
    "ModeResult",
    "Play",
    "Prices",
    "SessionRow",
    "check_infrastructure",
    "clopper_pearson",
    "clustered_interval",
    "compare_results",
    "compare_rows",
    "evaluate_family",
    "evaluate_masked",
    "evaluate_policy",
    "pass_at_k",
    "play_sessions",
    "plays_of",
    "session_figures",
    "summarize",
    "tasks_digest",
]
