"""Grades an agent's sandbox; and the services that the sessions of one environment share.

Ensures that the agent can neither see nor manipulate the verifier:

1. All processes of the agent are killed before anything is read.
2. Tests run in a *fresh* sandbox: the task's pristine files plus the agent's changes that the task allows.
   Regular files only: links, bytecode and everything outside the workspace are not copied.
3. Hidden tests are added only now, replace the agent's files, and are added as probes: expected values stay
   outside if possible (see `hidden_tests`).
4. The list of tests and the records that each must produce are known outside. A process that exits early,
   hangs, dies or patches its runner produces too few records, and fails.
5. A submission that passed must fail the same tests with changed expectations (see `twins`), and values that
   tests compute themselves must be those of a run with the reference solution (see `oracles`).

Known limits. Inputs of hidden tests are visible to the code under test while it runs. Values that are not
plain data equal no literal. A function may recognise its inputs: against that only many and varied hidden
inputs help. Code that forges one of many comparisons that a test makes inside is detected only if a twin
changes that one. Tests that need a twin and have none, or whose expectations the code under test can change,
are listed (`Twins.open_tests`).

Equal changes are judged once: the members of a group often find the same fix, and a verdict is a function of
the task and the allowed changes if the hidden tests are deterministic.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from etude.agent import Registry, ToolLimits
from etude.agent.index.templates import TemplateIndexes
from etude.config import McpConfig, RewardConfig
from etude.environment.grading import Verdict, allowed_changes, apply_changes
from etude.environment.hidden_tests import HiddenFile, HiddenTest, judge_report, oracles_in, split_tests
from etude.environment.oracles import OracleValues, copy_arguments
from etude.environment.rewards import review_changes
from etude.environment.scripts import FORGEABLE, AgentDiff, find_changes, judge_by_script
from etude.environment.twins import TwinFinder, Twins
from etude.errors import AgentError, SandboxError, TaskError
from etude.kit.tasks import off_loop, start_watched
from etude.records import Task
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import ProbeReport, Resources
from etude.tasks.exams import read_exams

GRADING_TIMEOUT_S = 5.0
"""Wall time limit of the hidden tests; they take milliseconds, so one that reaches it hangs."""
_MAX_KEPT = 4096
_BYTES_PER_CHARACTER = 100
"""Splitting one character of a test takes as long as processing so many characters of plain text."""
_MOST_REFERENCE_S = 60.0
"""Most wall time for changed tests on the reference solution, however many there are in one run."""

Found = TypeVar("Found")


class Grader:
    """Grades sessions, and caches the last verdicts by task and changes."""

    def __init__(
        self,
        backend: SandboxBackend,
        limits: Resources | None = None,
        timeout_s: float = GRADING_TIMEOUT_S,
        reward: RewardConfig | None = None,
    ) -> None:
        """`reward`: lints and style of the changes are counted if it prices them."""
        self._reward = reward
        # If passing some of the tests earns a reward, these are verified by twins as well.
        self._partial_counts = reward is not None and reward.partial_weight > 0
        self._timeout_s = timeout_s
        self.backend, self.limits = backend, limits or Resources()
        self._verdicts: _VerdictCache[Verdict] = _VerdictCache()
        self._twins: _VerdictCache[Twins] = _VerdictCache()

    async def grade(self, task: Task, sandbox: Sandbox) -> Verdict:
        """Judges the agent's changes in a fresh sandbox. Kills the agent's processes, but not `sandbox`.

        A fault of the agent (a hang, a crash, a full disk) is a verdict with a cause. Raises SandboxError if
        our own machinery failed, which is no verdict, and TaskError for invalid hidden tests.
        """
        began = time.perf_counter()
        try:
            diff = await find_changes(task, sandbox)
        except AgentError as error:
            num_tests = 1 if task.verifier else sum(len(file.tests) for file in await _hidden_files(task))
            return Verdict(False, 0, num_tests, str(error), time.perf_counter() - began)
        contents = sorted((path, data and _digest(data)) for path, data in diff.changes.items())
        links = diff.links and sorted(diff.links.items())
        parts = contents, sorted(diff.executable), links, diff.elsewhere and diff.elsewhere.digest
        key = _judge_digest(task) + _digest(repr(parts))
        return await self._verdicts.get(key, lambda: self.judge(task, diff))

    async def find_twins(self, task: Task) -> Twins:
        """The twins of a task's hidden tests, and the tests without protection. Raises as `grade`."""
        if task.verifier is None:
            return await self._twins.get(_judge_digest(task), lambda: self._try_changes(task))
        if all(script.machine is not None for script in task.verifiers):
            return Twins()
        if task.verifier.exams:
            return Twins(open_tests=read_exams(task.verifier.exams).open_tests)
        return Twins(open_tests={"tests/test.sh::reward": FORGEABLE})

    async def judge(self, task: Task, diff: AgentDiff) -> Verdict:
        """Judges an agent's changes without the cache. Raises as `grade`."""
        if task.verifier is not None:
            verdict = await judge_by_script(task, diff, self.backend, self.limits)
        else:
            verdict = await self._judge_tests(task, diff.changes)
        if self._reward is None or not self._reward.reviews_changes:
            return verdict
        lints, style = await review_changes(task, diff.changes, self._reward)
        return replace(verdict, lints=lints, style=style)

    async def _judge_tests(self, task: Task, changes: Mapping[str, bytes | None]) -> Verdict:
        """Runs the hidden tests on allowed changes, and twins if they pass, each in a fresh sandbox."""
        start_s = time.perf_counter()
        hidden = await _hidden_files(task)
        num_tests = sum(len(file.tests) for file in hidden)
        failures, cause, oracles = await self._run_tests(
            task, changes, hidden, {file.path: file.probe for file in hidden}
        )
        if not failures or (self._partial_counts and len(failures) < num_tests):
            twins = await self.find_twins(task)
            forged = _find_forged_test(twins, failures, oracles)
            if forged is not None and await self._passes_with_copies(task, changes, hidden, failures, twins):
                forged = None
            for exam in twins.exams:
                if forged is not None:
                    break
                found, _, _ = await self._run_tests(task, changes, hidden, exam.files)
                ended = {
                    str(test): "failed" if test in found else "passed"
                    for file in hidden
                    for test in file.tests
                }
                forged = exam.judge(ended, set(map(str, failures)))
            if forged is not None:
                return Verdict(False, 0, num_tests, forged, time.perf_counter() - start_s)
        num_passed = num_tests - len(failures)
        return Verdict(not failures, num_passed, len(failures), cause, time.perf_counter() - start_s)

    async def _passes_with_copies(
        self,
        task: Task,
        changes: Mapping[str, bytes | None],
        hidden: Sequence[HiddenFile],
        failures: Mapping[HiddenTest, str],
        twins: Twins,
    ) -> bool:
        """Whether the tests pass, with the right oracles, if the solution gets copies of its arguments: then
        it has only modified its arguments, and its answers for the original ones were right."""
        files = {file.path: copy_arguments(file.probe, file.solution_names) for file in hidden}
        found, _, oracles = await self._run_tests(task, changes, hidden, files)
        return found.keys() == failures.keys() and _find_forged_test(twins, found, oracles) is None

    async def _try_changes(self, task: Task) -> Twins:
        """Finds the exams for submissions that pass, and the tests without protection."""
        hidden = await _hidden_files(task)
        others = {
            path: text for path, text in task.hidden_files.items() if path not in task.hidden_test_paths
        }
        finder = await asyncio.to_thread(TwinFinder, hidden, others)
        if not finder.questionable:
            return Twins()
        if not task.solution_files:
            reason = "the task has no reference solution on which changes could be tried"
            return Twins(open_tests={str(test): reason for test in finder.questionable})
        solution = allowed_changes(
            task, {path: text.encode(errors="surrogatepass") for path, text in task.solution_files.items()}
        )

        async def run(files: Mapping[str, str], paths: Sequence[str], times: int) -> ProbeReport:
            timeout_s = min(self._timeout_s * times, max(self._timeout_s, _MOST_REFERENCE_S))
            try:
                return await self._probe(task, solution, files, paths, timeout_s)
            except SandboxKilledByAgentError as error:
                raise SandboxError(f"the reference solution's sandbox died: {error}") from error
            except AgentError as error:
                return ProbeReport((), str(error), False, 0.0)

        return await finder.find(run)

    async def _run_tests(
        self,
        task: Task,
        changes: Mapping[str, bytes | None],
        hidden: Sequence[HiddenFile],
        files: Mapping[str, str],
    ) -> tuple[dict[HiddenTest, str], str | None, dict[tuple[str, str], OracleValues]]:
        """(reason of every test that did not demonstrably pass, the first of them for people, oracles)."""
        try:
            report = await self._probe(task, changes, files, [file.path for file in hidden], self._timeout_s)
        except AgentError as error:
            return {test: str(error) for file in hidden for test in file.tests}, str(error), {}
        failures = judge_report(hidden, report)
        cause = None
        if failures:
            test, reason = next(iter(failures.items()))
            cause = report.error or f"{test.name}: {reason}"
        if failures and report.timed_out:
            cause = f"timeout: the hidden tests did not end within {self._timeout_s:g} s"
        return failures, cause, oracles_in(report)

    async def _probe(
        self,
        task: Task,
        changes: Mapping[str, bytes | None],
        files: Mapping[str, str],
        paths: Sequence[str],
        timeout_s: float,
    ) -> ProbeReport:
        """Runs test files in a fresh sandbox with the changes, then the hidden files, then `files`."""
        async with await self.backend.create(Template(task.files, task.id), self.limits) as fresh:
            await apply_changes({**changes, **task.hidden_files, **files}, fresh)
            return await fresh.run_probes(paths, timeout_s)


@dataclass(frozen=True, slots=True, eq=False)
class SessionServices:
    """Settings and services that the sessions of one environment share."""

    backend: SandboxBackend
    grader: Grader
    tools: Registry
    limits: ToolLimits = field(default_factory=ToolLimits)
    reward: RewardConfig = field(default_factory=RewardConfig)
    indexes: TemplateIndexes | None = None
    """Code indexes; None: searches run in the sandboxes."""
    servers: Mapping[str, McpConfig] = field(default_factory=dict[str, McpConfig])
    """MCP servers of each session."""
    snapshot_every: int = 0
    """Turns with changes between snapshots, which shorten the replay of earlier forks; 0: no snapshots."""
    life_s: float | None = None
    """Sandboxes are killed after so long, even if this process has ended."""


class _VerdictCache(Generic[Found]):
    """A cache by digest, oldest evicted first, that computes each value once at a time.

    Concurrent requests for a key wait for the same computation. Failures are neither cached nor shared: a
    caller that waited for one then computes the value itself.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, asyncio.Task[Found]] = OrderedDict()

    async def get(self, key: bytes, find: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
        """The cached value for this key, else that of `find`."""
        finding = self._kept.get(key)
        is_shared = finding is not None
        if finding is None:
            # A run that ends kills the sandboxes in which changes are still being judged, and waits for none.
            finding = start_watched(find())
            self._kept[key] = finding
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        try:
            return await asyncio.shield(finding)
        except BaseException as error:
            if self._kept.get(key) is finding:
                del self._kept[key]
            if not (is_shared and isinstance(error, SandboxError)):
                raise
        return await find()


async def _hidden_files(task: Task) -> list[HiddenFile]:
    """Splits the hidden test files, in a thread if large. Raises TaskError for a file without tests."""
    size = sum(len(task.hidden_files.get(path, "")) for path in task.hidden_test_paths)
    return await off_loop(_BYTES_PER_CHARACTER * size, _hidden_tests, task)


def _hidden_tests(task: Task) -> list[HiddenFile]:
    if not task.hidden_test_paths:
        raise TaskError("a task needs hidden tests to be graded", field="hidden_test_paths", received=task.id)
    for path in task.hidden_test_paths:
        if path not in task.hidden_files:
            raise TaskError("is not among hidden_files", field="hidden_test_paths", received=path)
    workspace = frozenset(
        path.partition("/")[0].removesuffix(".py") for path in (*task.files, *task.solution_files)
    )
    hidden = frozenset(task.hidden_files)
    return [split_tests(path, task.hidden_files[path], workspace, hidden) for path in task.hidden_test_paths]


def _find_forged_test(
    twins: Twins, failures: Mapping[HiddenTest, str], found: Mapping[tuple[str, str], OracleValues]
) -> str | None:
    """Cause of a verdict: a passed test whose oracles are not those of the reference solution; or None."""
    for test, known in twins.oracles.items():
        here = found.get((test.path, test.name), {})
        if test not in failures and any(here.get(index) != values for index, values in known.items()):
            return f"{test.name}: computes other values than with the reference solution: it is forged"
    return None


def _judge_digest(task: Task) -> bytes:
    """Digest of everything that a verdict depends on. The id is not enough: clients of a server send their
    own tasks, and correct them."""
    script = task.verifier and replace(task.verifier, archive=_archive_digest(task.verifier.archive))
    files = task.files, task.hidden_files, task.solution_files
    return _digest(repr((files, task.hidden_test_paths, task.machine, script)))


def _digest(data: bytes | str) -> bytes:
    data = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    return blake2b(data, digest_size=16).digest()


_archive_digest = lru_cache(256)(_digest)
"""Cached: an archive may have 64 MiB, and a task is graded many times."""
