"""Benchmark suites, their statistics, and paired comparisons."""

from etude.evaluation.acting import ActingTasks as ActingTasks
from etude.evaluation.acting import evaluate_family as evaluate_family
from etude.evaluation.acting import evaluate_masked as evaluate_masked
from etude.evaluation.comparison import compare_results as compare_results
from etude.evaluation.comparison import compare_rows as compare_rows
from etude.evaluation.intervals import clopper_pearson as clopper_pearson
from etude.evaluation.intervals import clustered_interval as clustered_interval
from etude.evaluation.results import EvaluationResult as EvaluationResult
from etude.evaluation.results import ModeResult as ModeResult
from etude.evaluation.sessions import Play as Play
from etude.evaluation.sessions import SessionRow as SessionRow
from etude.evaluation.sessions import play_sessions as play_sessions
from etude.evaluation.sessions import plays_of as plays_of
from etude.evaluation.statistics import Prices as Prices
from etude.evaluation.statistics import pass_at_k as pass_at_k
from etude.evaluation.statistics import session_figures as session_figures
from etude.evaluation.statistics import summarize as summarize
from etude.evaluation.suite import Evaluation as Evaluation
from etude.evaluation.suite import check_infrastructure as check_infrastructure
from etude.evaluation.suite import evaluate_policy as evaluate_policy
from etude.evaluation.suite import tasks_digest as tasks_digest
