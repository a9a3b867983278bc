"""From an agent's sandbox to its verdict, and what sessions share to get there.

Enforces that the agent can neither see nor bend the verifier:

1. Every process of the agent is dead before anything is looked at.
2. Judged is a *fresh* sandbox: the task's pristine files plus the agent's changes as far as the task
   allows them. Regular files only: links, bytecode and everything outside the workspace stay behind.
3. Hidden tests enter now, win over the agent's files, and enter as probes: expected values stay outside where
   they can (see `hidden_tests`).
4. Which tests there are and what each must have recorded is known from outside. A process that exits
   early, hangs, dies or patches its runner produces too little, and fails.
5. What passed must fail the same tests where they expect something else (see `twins`), and tests must have
   computed for themselves what they do beside the reference solution (see `oracles`).

Honest limits. Inputs of hidden tests are visible to the code under test while it runs. Values that are not
plain data equal no literal. A function may recognise its inputs: against that only many and varied hidden
inputs help. Code that forges one comparison of a test that makes many inside is caught only if its twin
changes that one. Tests that need a twin and have none, or that expect what the code under test can change,
are listed (`Twins.open_tests`).

Equal changes are judged once: the members of a group often find the same fix, and a verdict is a function of
the task and of the allowed changes, as far as the hidden tests are deterministic.
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
from etude.environment.grading import Verdict, allowed_changes, lay_files
from etude.environment.hidden_tests import HiddenFile, HiddenTest, judge_report, oracles_in, take_apart
from etude.environment.oracles import OracleValues, spare_arguments
from etude.environment.rewards import review_changes
from etude.environment.scripts import FORGEABLE, Left, find_left, judge_by_script
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
"""Wall time for the hidden tests; they take milliseconds, so who needs this long hangs."""
_MAX_KEPT = 4096
_BYTES_PER_CHARACTER = 100
"""What takes the time of a character of a test apart is worth as many characters of plain text."""
_MOST_REFERENCE_S = 60.0
"""Wall time for changed tests on the reference solution, however many there are in one run."""

Found = TypeVar("Found")


class Grader:
    """Grades, and remembers the verdicts on the changes that were last asked for."""

    def __init__(
        self,
        backend: SandboxBackend,
        limits: Resources | None = None,
        timeout_s: float = GRADING_TIMEOUT_S,
        reward: RewardConfig | None = None,
    ) -> None:
        """`reward`: what it prices in the changes themselves is counted as well."""
        self._reward = reward
        # What earns something by some of the tests has these tested by twins too.
        self._partial_counts = reward is not None and reward.partial_weight > 0
        self._timeout_s = timeout_s
        self.backend, self.limits = backend, limits or Resources()
        self._verdicts: _Memory[Verdict] = _Memory()
        self._twins: _Memory[Twins] = _Memory()

    async def grade(self, task: Task, sandbox: Sandbox) -> Verdict:
        """Judges the agent's changes in a fresh sandbox. Ends the agent's processes; does not kill `sandbox`.

        What the agent did wrong (a hang, a crash, a full disk) is a verdict with a cause. Raises SandboxError
        if our own machinery failed, which is no verdict, and TaskError for hidden tests that are none.
        """
        began = time.perf_counter()
        try:
            left = await find_left(task, sandbox)
        except AgentError as error:
            num_tests = 1 if task.verifier else sum(len(file.tests) for file in await _take_tests_apart(task))
            return Verdict(False, 0, num_tests, str(error), time.perf_counter() - began)
        contents = sorted((path, data and _digest(data)) for path, data in left.changes.items())
        links = left.links and sorted(left.links.items())
        parts = contents, sorted(left.executable), links, left.elsewhere and left.elsewhere.digest
        key = _judge_digest(task) + _digest(repr(parts))
        return await self._verdicts.recall(key, lambda: self.judge(task, left))

    async def find_twins(self, task: Task) -> Twins:
        """The twins of a task's hidden tests, and the tests that they leave open. Raises as `grade`."""
        if task.verifier is None:
            return await self._twins.recall(_judge_digest(task), lambda: self._try_changes(task))
        if all(script.machine is not None for script in task.verifiers):
            return Twins()
        if task.verifier.exams:
            return Twins(open_tests=read_exams(task.verifier.exams).open_tests)
        return Twins(open_tests={"tests/test.sh::reward": FORGEABLE})

    async def judge(self, task: Task, left: Left) -> Verdict:
        """The verdict on what an agent left behind, made now. Raises as `grade`."""
        if task.verifier is not None:
            verdict = await judge_by_script(task, left, self.backend, self.limits)
        else:
            verdict = await self._judge_tests(task, left.changes)
        if self._reward is None or not self._reward.reviews_changes:
            return verdict
        lints, style = await review_changes(task, left.changes, self._reward)
        return replace(verdict, lints=lints, style=style)

    async def _judge_tests(self, task: Task, changes: Mapping[str, bytes | None]) -> Verdict:
        """Runs hidden tests over what `allowed_changes` gave, each time in a fresh sandbox; asks for twins
        if they pass."""
        start_s = time.perf_counter()
        hidden = await _take_tests_apart(task)
        num_tests = sum(len(file.tests) for file in hidden)
        failures, cause, oracles = await self._sit(
            task, changes, hidden, {file.path: file.probe for file in hidden}
        )
        if not failures or (self._partial_counts and len(failures) < num_tests):
            twins = await self.find_twins(task)
            forged = _bent(twins, failures, oracles)
            if forged is not None and await self._passes_with_copies(task, changes, hidden, failures, twins):
                forged = None
            for exam in twins.exams:
                if forged is not None:
                    break
                found, _, _ = await self._sit(task, changes, hidden, exam.files)
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
        """Whether the tests pass, and compute what they should, where the solution cannot change their own
        values: then it has changed its arguments, and answered right for what they were."""
        files = {file.path: spare_arguments(file.probe, file.solution_names) for file in hidden}
        found, _, oracles = await self._sit(task, changes, hidden, files)
        return found.keys() == failures.keys() and _bent(twins, found, oracles) is None

    async def _try_changes(self, task: Task) -> Twins:
        """The exams that a submission has to sit which passed, and the tests that they leave open."""
        hidden = await _take_tests_apart(task)
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

    async def _sit(
        self,
        task: Task,
        changes: Mapping[str, bytes | None],
        hidden: Sequence[HiddenFile],
        files: Mapping[str, str],
    ) -> tuple[dict[HiddenTest, str], str | None, dict[tuple[str, str], OracleValues]]:
        """(reason of every test that did not demonstrably pass, the first in words, what the tests computed
        for themselves)."""
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
        """Runs test files in a sandbox of their own, over the changes, the hidden files and `files`."""
        async with await self.backend.create(Template(task.files, task.id), self.limits) as fresh:
            await lay_files({**changes, **task.hidden_files, **files}, fresh)
            return await fresh.run_probes(paths, timeout_s)


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """What the sessions of one environment share."""

    backend: SandboxBackend
    grader: Grader
    tools: Registry
    limits: ToolLimits = field(default_factory=ToolLimits)
    reward: RewardConfig = field(default_factory=RewardConfig)
    indexes: TemplateIndexes | None = None
    """Code indexes; None: sandboxes search by themselves."""
    servers: Mapping[str, McpConfig] = field(default_factory=dict[str, McpConfig])
    """MCP servers of each session, with what they offer."""
    snapshot_every: int = 0
    """Turns that changed something after which a snapshot is taken, so that forks at earlier turns replay
    less; 0: none is."""
    life_s: float | None = None
    """Sandboxes end by themselves after it, whatever becomes of this process."""


class _Memory(Generic[Found]):
    """What was last asked for, by digest.

    Who asks for something that is being found waits for it. Failures are never remembered, nor shared: who
    waited for one then finds it alone.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, asyncio.Task[Found]] = OrderedDict()

    async def recall(self, key: bytes, find: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
        """What `find` gives, or has given for this key."""
        finding = self._kept.get(key)
        is_anothers = finding is not None
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
            if not (is_anothers and isinstance(error, SandboxError)):
                raise
        return await find()


async def _take_tests_apart(task: Task) -> list[HiddenFile]:
    """The hidden test files, in a thread where they are large. Raises TaskError for files that hold none."""
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
    return [take_apart(path, task.hidden_files[path], workspace, hidden) for path in task.hidden_test_paths]


def _bent(
    twins: Twins, failures: Mapping[HiddenTest, str], found: Mapping[tuple[str, str], OracleValues]
) -> str | None:
    """Which test that passed computed something else for itself than beside the reference solution."""
    for test, known in twins.oracles.items():
        here = found.get((test.path, test.name), {})
        if test not in failures and any(here.get(index) != values for index, values in known.items()):
            return f"{test.name}: computes something else than beside the reference solution: it is forged"
    return None


def _judge_digest(task: Task) -> bytes:
    """Names what a task judges by. Its id does not: clients of a server send tasks of their own, and correct
    them."""
    script = task.verifier and replace(task.verifier, archive=_archive_digest(task.verifier.archive))
    files = task.files, task.hidden_files, task.solution_files
    return _digest(repr((files, task.hidden_test_paths, task.machine, script)))


def _digest(data: bytes | str) -> bytes:
    data = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    return blake2b(data, digest_size=16).digest()


_archive_digest = lru_cache(256)(_digest)
"""Of one that may have 64 MiB; a task is graded many times."""
