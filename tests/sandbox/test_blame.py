"""Attribution of a sandbox's failure: to the agent, unless the host shows that it failed itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from etude.errors import EtudeError, SandboxError
from etude.sandbox.blame import Blame, Evidence
from etude.sandbox.errors import SandboxKilledByAgentError

ERROR = SandboxError("the sandbox died: its server ended", field="sandbox", received="one")


@pytest.fixture(autouse=True)
def _sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.sandbox.blame.EVIDENCE_S", 0.02)


def evidence(
    is_ours: bool = False, host: str | None = None, agent: str | None = None, num_live: int = 1
) -> Evidence:
    return Evidence(lambda: is_ours, lambda: host, lambda: agent, lambda: num_live)


def judge(*sandboxes: Evidence) -> list[EtudeError]:
    """How sandboxes are judged that fail at the same moment."""

    async def run() -> list[EtudeError]:
        blame = Blame()
        judging = (blame.judge(f"number {n}", ERROR, one) for n, one in enumerate(sandboxes))
        return await asyncio.gather(*judging)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("one", "is_ours"),
    [
        (evidence(), False),
        (evidence(agent="it used up its memory"), False),
        (evidence(is_ours=True), True),
        (evidence(is_ours=True, agent="it used up its memory"), True),
        (evidence(host="the fork server has ended"), True),
        (evidence(host="the fork server has ended", agent="it used up its memory"), True),
    ],
)
def test_a_failure_is_the_agents_unless_the_host_shows_its_own(one: Evidence, is_ours: bool) -> None:
    (judged,) = judge(one)
    assert (judged is ERROR) == is_ours
    assert is_ours or isinstance(judged, SandboxKilledByAgentError)


def test_the_cause_is_what_the_agent_did_as_far_as_that_shows() -> None:
    assert [str(error).partition(";")[0] for error in judge(evidence(agent="it used up its memory"))] == [
        "sandbox: it used up its memory"
    ]
    assert "its server ended" in str(judge(evidence())[0])


@pytest.mark.parametrize(
    ("num_failing", "num_live", "agent", "is_ours"),
    [
        (3, 3, None, True),
        (3, 6, None, True),
        (2, 2, None, False),
        (3, 7, None, False),
        (3, 3, "memory", False),
    ],
)
def test_most_sandboxes_of_a_host_that_fail_together_are_its_failure(
    num_failing: int, num_live: int, agent: str | None, is_ours: bool
) -> None:
    judged = judge(*[evidence(agent=agent, num_live=num_live)] * num_failing)
    assert {error is ERROR for error in judged} == {is_ours}


def test_what_the_host_shows_a_moment_later_counts() -> None:
    shown: list[str] = []
    late = Evidence(lambda: False, lambda: shown[0] if shown else None, lambda: None, lambda: 1)

    async def run() -> EtudeError:
        judging = asyncio.ensure_future(Blame().judge("one", ERROR, late))
        await asyncio.sleep(0)
        shown.append("the fork server has ended")
        return await judging

    assert asyncio.run(run()) is ERROR


def test_a_dead_sandbox_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        blame = Blame()
        first = await blame.judge("one", ERROR, evidence())
        monkeypatch.setattr("etude.sandbox.blame.EVIDENCE_S", 60.0)
        async with asyncio.timeout(5):
            again = await blame.judge("one", ERROR, evidence(host="the host failed later"))
        assert type(again) is type(first) is SandboxKilledByAgentError

    asyncio.run(run())


def test_failures_at_different_times_are_not_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    clock: Callable[[], float] = lambda: now_s[0]  # noqa: E731
    monkeypatch.setattr("etude.sandbox.blame.monotonic", clock)

    async def run() -> list[EtudeError]:
        blame = Blame()
        judged: list[EtudeError] = []
        for number in range(3):
            now_s[0] += 5.0
            judged.append(await blame.judge(f"number {number}", ERROR, evidence(num_live=3)))
        return judged

    assert ERROR not in asyncio.run(run())
