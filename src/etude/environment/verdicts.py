"""From an agent's sandbox to its verdict; equal changes are judged once.

The members of a group often find the same fix, and a verdict is a function of the task and of the allowed
changes, as far as the hidden tests are deterministic.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b

from etude.config import RewardConfig
from etude.environment.grading import (
    GRADING_TIMEOUT_S,
    Verdict,
    allowed_changes,
    count_hidden_tests,
    judge_changes,
)
from etude.environment.rewards.review import review_changes
from etude.errors import AgentError, SandboxError
from etude.records import Task
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.types import Resources

_MAX_KEPT = 4096


class Grader:
    """Grades, and remembers the verdicts on the changes that were last asked for.

    Who asks for changes that are being judged waits for that verdict. Failures are never remembered, nor
    shared: whoever waited for one then judges by itself.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        limits: Resources | None = None,
        timeout_s: float = GRADING_TIMEOUT_S,
        reward: RewardConfig | None = None,
    ) -> None:
        """`reward`: what it prices in the changes themselves is counted as well."""
        self._reward = reward
        self._backend = backend
        self._limits = limits
        self._timeout_s = timeout_s
        self._verdicts: OrderedDict[tuple[bytes, bytes], asyncio.Task[Verdict]] = OrderedDict()

    async def grade(self, task: Task, sandbox: Sandbox) -> Verdict:
        """Judges the agent's changes in a fresh sandbox. Ends the agent's processes; does not kill `sandbox`.

        What the agent did wrong (a hang, a crash, a full disk) is a verdict with a cause. Raises SandboxError
        if our own machinery failed, which is no verdict, and TaskError for hidden tests that are none.
        """
        began = time.perf_counter()
        try:
            changes = allowed_changes(task, await sandbox.final_diff())
        except AgentError as error:
            return Verdict(False, 0, count_hidden_tests(task), str(error), time.perf_counter() - began)
        key = (_judge_digest(task), _digest(changes))
        judging = self._verdicts.get(key)
        is_anothers = judging is not None
        if judging is None:
            judging = asyncio.create_task(self._judge(task, changes))
            judging.add_done_callback(_hear)
            self._remember(key, judging)
        try:
            return await asyncio.shield(judging)
        except BaseException as error:
            if self._verdicts.get(key) is judging:
                del self._verdicts[key]
            if not (is_anothers and isinstance(error, SandboxError)):
                raise
        return await self._judge(task, changes)

    async def _judge(self, task: Task, changes: Mapping[str, bytes | None]) -> Verdict:
        verdict = await judge_changes(task, changes, self._backend, self._limits, self._timeout_s)
        if self._reward is None or not self._reward.reviews_changes:
            return verdict
        lints, style = await review_changes(task, changes, self._reward)
        return replace(verdict, lints=lints, style=style)

    def _remember(self, key: tuple[bytes, bytes], judging: asyncio.Task[Verdict]) -> None:
        self._verdicts[key] = judging
        while len(self._verdicts) > _MAX_KEPT:
            self._verdicts.popitem(last=False)


def _hear(judging: asyncio.Task[Verdict]) -> None:
    """Takes note of a failure for which nobody waits any more: a run that ends kills the sandboxes in which
    changes are still being judged. Whoever does wait gets it all the same."""
    if not judging.cancelled():
        judging.exception()


def _judge_digest(task: Task) -> bytes:
    """Names what a task judges by. Its id does not: clients of a server send tasks of their own, and mend
    them."""
    files = (task.files, task.hidden_files, dict.fromkeys(task.hidden_test_paths, ""))
    return b"".join(
        _digest({path: text.encode(errors="surrogatepass") for path, text in some.items()}) for some in files
    )


def _digest(changes: Mapping[str, bytes | None]) -> bytes:
    state = blake2b(digest_size=16)
    for path, data in sorted(changes.items()):
        content = b"-" if data is None else b"+" + data
        name = path.encode(errors="surrogateescape")
        state.update(b"%d %d " % (len(name), len(content)) + name + content)
    return state.digest()
