import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from etude.agent import ToolLimits, core_registry
from etude.agent.tools.state import BackgroundState
from etude.config import RewardConfig
from etude.environment.episodes import Environment, EpisodeLimits
from etude.environment.fork_groups import (
    ForkedEpisode,
    ForkPlan,
    ForkRefusal,
    SiblingSpec,
    choose_turn,
)
from etude.environment.runners import EpisodeRequest
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.errors import SamplerError, SandboxError
from etude.records import Group, Relation, SamplingParams, Status, TrajectoryId
from etude.sandbox.errors import LiveProcessesError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.store.blobs import MemoryBlobs
from etude.store.documents import group_document, group_from_document
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import (
    FAILS,
    FINISH,
    MEND,
    READ,
    SOLVES,
    SPOIL,
    TASK,
    Turn,
    new_environment,
    run_episode,
    script_of,
    scripted,
)
from tests.environment.stored import LIMITS, SUMMARIES, byte_renderer, sampler_of
from tests.fakes.faulty_sandbox import FaultyBackend, FaultySandbox
from tests.fakes.scripted import ScriptedSampler
from tests.sandbox.backends import with_backend

PARENT = TrajectoryId("run", TASK.id, 0, 4, 0)
SIBLINGS = tuple(SiblingSpec(replace(PARENT, index=9 + n), (7, 4, 9 + n)) for n in range(2))
PLAN = ForkPlan("first_edit", SIBLINGS, (7, 4, 1))


def play(session_id: str) -> Sequence[Turn]:
    """The forked session fails, one sibling of two solves."""
    index = int(session_id.partition("~")[0].rpartition("/")[2])
    return SOLVES if index == 9 else FAILS


def new_sampler() -> ScriptedSampler:
    return ScriptedSampler(script_of(play), route_shape=(2, 2))


def ordered(plan: ForkPlan) -> EpisodeRequest:
    """The session that is forked as planned."""
    return EpisodeRequest(TASK, PARENT, (7, 4, 0), SamplingParams(), True, plan)


def fork(
    backend: SandboxBackend | None = None,
    sampler: ScriptedSampler | None = None,
    blobs: MemoryBlobs | None = None,
    plan: ForkPlan = PLAN,
) -> ForkedEpisode:
    environment = new_environment(backend, blobs)
    return asyncio.run(environment.play(ordered(plan), sampler or new_sampler()))


def test_siblings_go_on_from_the_very_state_and_are_graded_on_their_own() -> None:
    backend, sampler, blobs = MemoryBackend(), new_sampler(), MemoryBlobs()
    episode = fork(backend, sampler, blobs)
    parent, (segment,) = episode.trajectory, episode.trajectory.segments
    assert episode.origin is not None
    offset = parent.turns[1].start
    assert (episode.origin.segment_id, episode.origin.offset) == (segment.id, offset)
    assert episode.origin.fidelity == "filesystem"
    assert [m.id.index for m in episode.siblings] == [9, 10], "not what the forked session itself did"
    assert [m.reward.task for m in episode.siblings if m.reward] == [1.0, 0.0]
    for member in episode.siblings:
        (own,) = member.segments
        assert (own.relation, own.parent) == (Relation.FORK, (segment.id, offset))
        assert own.tokens[:offset].tolist() == segment.tokens[:offset].tolist()
        assert not own.sampled[:offset].any()
        assert own.sampled[offset:].any()
        assert own.id == f"{member.id}#0"
        assert min(span.start for span in own.version_spans) >= offset
        assert own.routes is not None
        assert blobs.get(own.routes).shape[0] == len(own.tokens)
        assert member.facts["fork_fidelity"] == "filesystem"
        assert member.facts["forked_at"] == 1
        assert member.facts["sampled_tokens"] == member.num_sampled_tokens
    assert not backend.live
    assert not sampler.open_sessions


def test_the_forked_session_is_what_it_would_have_been_without_a_fork() -> None:
    forked = fork().trajectory
    plain = run_episode(new_environment(), new_sampler(), identity=PARENT)
    assert forked.segments[0].tokens.tolist() == plain.segments[0].tokens.tolist()
    assert forked.segments[0].sampled.tolist() == plain.segments[0].sampled.tolist()
    assert forked.reward == plain.reward
    assert forked.facts == plain.facts


def test_siblings_are_opened_before_the_forked_session_is_closed() -> None:
    """Else what the engine computes together would depend on how long copies of a sandbox take."""
    events: list[tuple[str, str]] = []

    class Noting(ScriptedSampler):
        def open(self, session_id: str, sibling: str | None = None) -> None:
            events.append(("open", session_id))
            super().open(session_id)

        def close(self, session_id: str) -> None:
            events.append(("close", session_id))
            super().close(session_id)

    fork(sampler=Noting(script_of(play)))
    parent, *siblings = (f"{one}~0" for one in (PARENT, *(place.identity for place in SIBLINGS)))
    assert events[:4] == [("open", parent), *(("open", one) for one in siblings), ("close", parent)]
    assert sorted(events[4:]) == sorted(("close", one) for one in siblings)


def test_a_sibling_that_we_failed_is_reported_as_such_and_nothing_is_left() -> None:
    backend = MemoryBackend()

    class Failing(ScriptedSampler):
        async def stream(self, request):
            if request.session_id.endswith("/10~0"):
                raise SamplerError("the engine failed")
            async for chunk in super().stream(request):
                yield chunk

    sampler = Failing(script_of(play), route_shape=(2, 2))
    episode = fork(backend, sampler)
    assert [m.status for m in episode.siblings] == [Status.DONE, Status.INFRASTRUCTURE]
    assert episode.siblings[1].reward is None
    assert not backend.live
    assert not sampler.open_sessions


class CopiesShort(FaultyBackend):
    """Of the copies of a sandbox the last cannot be had."""

    async def create(self, *arguments: Any, **named: Any) -> Sandbox:
        return _CopiesShort(self, await self.inner.create(*arguments, **named))


class _CopiesShort(FaultySandbox):
    async def fork(self, count: int = 1) -> list[Sandbox | SandboxError]:
        *copies, last = await super().fork(count)
        assert not isinstance(last, SandboxError)
        await last.kill()
        return [*copies, SandboxError("no room for another copy")]


def test_a_sibling_without_a_sandbox_is_reported_as_such_also_behind_a_summary() -> None:
    inner = MemoryBackend()
    policies = {"0": sampler_of([*[(READ,)] * 6, (SPOIL,), (FINISH,)], SUMMARIES), "9": scripted_end()}
    environment = Environment(
        CopiesShort(inner, {}),
        byte_renderer(),
        EpisodeLimits(LIMITS, SUMMARIES),
        RewardConfig(),
        MemoryBlobs().put,
    )

    class Both(ScriptedSampler):
        def stream(self, request):
            return policies[request.session_id.partition("~")[0].rpartition("/")[2]].stream(request)

    run = environment.play(ordered(PLAN), Both(script_of(play)))
    episode = asyncio.run(run)
    assert episode.origin is not None
    assert episode.origin.segment_id != f"{PARENT}#0", "the edit comes in a later context"
    assert [m.status for m in episode.siblings] == [Status.DONE, Status.INFRASTRUCTURE]
    failed = episode.siblings[1]
    assert failed.segments[0].parent == (episode.origin.segment_id, episode.origin.offset)
    assert failed.num_sampled_tokens == 0
    assert not inner.live


def scripted_end() -> ScriptedSampler:
    """A policy that ends each session at once."""
    return ScriptedSampler(lambda session, context: byte_renderer().message((FINISH,)))


def test_a_fork_that_cannot_be_made_leaves_the_session_as_it_is() -> None:
    backend = FaultyBackend(MemoryBackend(), {"fork": 1})
    episode = fork(backend)
    assert (episode.refused, episode.siblings, episode.origin) == (ForkRefusal.INFRASTRUCTURE, (), None)
    assert episode.trajectory.status is Status.DONE
    assert episode.trajectory.reward is not None


def test_a_failure_of_the_forked_session_does_all_of_it_again() -> None:
    inner = MemoryBackend()
    episode = fork(FaultyBackend(inner, {"tests": 1}))
    assert episode.trajectory.attempt == 1
    assert [m.reward.task for m in episode.siblings if m.reward] == [1.0, 0.0]
    assert not inner.live


def test_turns_are_chosen_by_what_they_are() -> None:
    done = run_episode(new_environment(), scripted([[READ], [READ], [SPOIL], [MEND], [FINISH]]))
    assert choose_turn(done, "first_edit", ()) == 2
    (segment,) = done.segments
    logprobs = segment.logprobs.copy()
    logprobs[done.turns[3].start : done.turns[3].end] = -0.5
    surprised = replace(done, segments=(replace(segment, logprobs=logprobs),))
    assert choose_turn(surprised, "entropy", ()) == 3
    assert {choose_turn(done, "random", (seed,)) for seed in range(40)} == {1, 2, 3, 4}
    assert choose_turn(done, "random", (5,)) == choose_turn(done, "random", (5,))
    assert (
        choose_turn(run_episode(new_environment(), scripted([[FINISH]])), "random", ())
        is ForkRefusal.TOO_SHORT
    )
    for turns in ([[READ], [FINISH]], [[MEND], [FINISH]]):
        unedited = run_episode(new_environment(), scripted(turns))
        assert choose_turn(unedited, "first_edit", ()) is ForkRefusal.NO_EDIT


def test_a_copy_of_files_alone_is_refused_while_commands_run() -> None:
    async def scenario(backend: SandboxBackend) -> None:
        services = SessionServices(backend, Grader(backend), core_registry(), ToolLimits())
        env_session = EnvironmentSession.begin(services, TASK)
        try:
            command = await env_session.sandbox.commands.start("sleep 600")
            env_session.context.state.commands["1"] = BackgroundState(command.pid)
            with pytest.raises(LiveProcessesError, match="sleep 600"):
                await env_session.fork()
            await command.kill()
            await command.wait(60)
            (copy,) = await env_session.fork()
            assert isinstance(copy, EnvironmentSession)
            await copy.close()
        finally:
            await env_session.close()

    with_backend("unisolated", scenario)


def test_the_origin_of_a_fork_is_stored_whole() -> None:
    episode = fork()
    group = Group("run/g4+fork", "fork", 3, (), episode.origin)
    assert group_from_document(group_document(group), ()).origin == episode.origin


def test_a_cancelled_fork_leaves_nothing_behind() -> None:
    backend = MemoryBackend()

    class Waiting(ScriptedSampler):
        """Siblings never get an answer."""

        async def stream(self, request):
            if request.session_id != f"{PARENT}~0":
                began.set()
                await asyncio.Event().wait()
            async for chunk in super().stream(request):
                yield chunk

    sampler = Waiting(script_of(play))

    async def scenario() -> None:
        run = new_environment(backend).play(ordered(PLAN), sampler)
        episode = asyncio.create_task(run)
        await began.wait()
        episode.cancel()
        await asyncio.wait([episode])
        assert episode.cancelled()

    began = asyncio.Event()
    asyncio.run(scenario())
    assert not backend.live
    assert not sampler.open_sessions


def test_an_engine_that_opens_no_sibling_fails_the_attempt_and_leaves_nothing_behind() -> None:
    backend = MemoryBackend()

    class Refusing(ScriptedSampler):
        def open(self, session_id: str, sibling: str | None = None) -> None:
            if "/10~" in session_id:
                raise SamplerError("the engine has failed")
            super().open(session_id)

    sampler = Refusing(script_of(play))
    episode = fork(backend, sampler)
    assert (episode.trajectory.status, episode.siblings) == (Status.INFRASTRUCTURE, ())
    assert not backend.live
    assert not sampler.open_sessions
