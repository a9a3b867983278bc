"""From an agent's sandbox to its verdict; equal changes are judged once.

The members of a group often find the same fix, and a verdict is a function of the task and of the allowed
changes, as far as the hidden tests are deterministic.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from etude.config import RewardConfig
from etude.environment.grading import GRADING_TIMEOUT_S, Judge, Verdict, count_hidden_tests
from etude.environment.rewards.review import review_changes
from etude.environment.scripts import FORGEABLE, Left, find_left, judge_by_script
from etude.environment.twins import Twins
from etude.errors import AgentError, SandboxError
from etude.kit.tasks import start_watched
from etude.records import Task
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.types import Resources
from etude.tasks.exams import read_exams

_MAX_KEPT = 4096

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
        partial_counts = reward is not None and reward.partial_weight > 0
        self._judging = Judge(backend, limits, timeout_s, partial_counts)
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
            num_tests = 1 if task.verifier else await count_hidden_tests(task)
            return Verdict(False, 0, num_tests, str(error), time.perf_counter() - began)
        contents = sorted((path, data and _digest(data)) for path, data in left.changes.items())
        links = left.links and sorted(left.links.items())
        parts = contents, sorted(left.executable), links, left.elsewhere and left.elsewhere.digest
        key = _judge_digest(task) + _digest_of(parts)
        return await self._verdicts.recall(key, lambda: self.judge(task, left))

    async def find_twins(self, task: Task) -> Twins:
        """The twins of a task's hidden tests, and the tests that they leave open. Raises as `grade`."""
        if task.verifier is None:
            return await self._twins.recall(_judge_digest(task), lambda: self._judging.find_twins(task))
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
            verdict = await self._judging.judge(task, left.changes, self.find_twins)
        if self._reward is None or not self._reward.reviews_changes:
            return verdict
        lints, style = await review_changes(task, left.changes, self._reward)
        return replace(verdict, lints=lints, style=style)


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


def _judge_digest(task: Task) -> bytes:
    """Names what a task judges by. Its id does not: clients of a server send tasks of their own, and correct
    them."""
    script = task.verifier and replace(task.verifier, archive=_archive_digest(task.verifier.archive))
    files = task.files, task.hidden_files, task.solution_files
    return _digest_of((files, task.hidden_test_paths, task.machine, script))


def _digest_of(what: object) -> bytes:
    return _digest(repr(what).encode(errors="surrogateescape"))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


_archive_digest = lru_cache(256)(_digest)
"""Of one that may have 64 MiB; a task is graded many times."""
