"""The policy in virtual time, against policies without knowledge of sessions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from benchmarks.load.workload import LogNormal, WorkloadShape, synthetic_sessions
from benchmarks.simulation.router.simple import RandomChoice, RoundRobin, RoundRobinSessions
from benchmarks.simulation.router.simulated_replica import ReplicaSpec
from benchmarks.simulation.router.simulation import Kill, RouterScenario, simulate
from benchmarks.simulation.router.step_cost import StepCost, fit_step_cost, read_step_cost
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.inference.router import Router, RoutingConfig

COST = StepCost(0.0012, 0.00018, 0.0008, 0.0001)
SPEC = ReplicaSpec(COST)
SHAPE = WorkloadShape(
    num_sessions=120, turns=LogNormal(5.0, 30.0), tool_s=LogNormal(0.2, 3.0), output_tokens=LogNormal(40, 400)
)
SESSIONS = synthetic_sessions(SHAPE)


def ours(names: Sequence[str]) -> Router:
    router = Router(RoutingConfig(prefill_weight=COST.prefill_weight))
    for name in names:
        router.join(name)
    return router


def test_twice_the_same_scenario_has_the_same_outcome() -> None:
    scenario = RouterScenario(SESSIONS[:40], SPEC, arrivals_per_s=10.0)
    assert simulate(scenario, ours) == simulate(scenario, ours)


@pytest.mark.parametrize("policy", [None, ours, RoundRobin, RoundRobinSessions, RandomChoice])
def test_every_policy_answers_everything(policy) -> None:
    outcome = simulate(RouterScenario(SESSIONS, SPEC, concurrency=48), policy)
    assert outcome.answered == sum(len(session.turns) for session in SESSIONS)
    assert outcome.output_tokens == sum(session.output_tokens for session in SESSIONS)
    assert outcome.unanswered == 0


def test_affinity_keeps_prefixes_and_round_robin_does_not() -> None:
    scenario = RouterScenario(SESSIONS, SPEC, arrivals_per_s=6.0)
    mine, theirs = simulate(scenario, ours), simulate(scenario, RoundRobin)
    assert mine.cache_hit_rate > theirs.cache_hit_rate + 0.1
    assert mine.latency_s(99) < theirs.latency_s(99)


def test_work_flows_round_a_slow_replica() -> None:
    scenario = RouterScenario(SESSIONS, SPEC, arrivals_per_s=12.0, slowness=(1.0, 1.0, 1.0, 4.0))
    assert simulate(scenario, ours).latency_s(99) < simulate(scenario, RoundRobinSessions).latency_s(99)


def test_a_lone_request_takes_what_the_cost_says() -> None:
    session = synthetic_sessions(WorkloadShape(num_sessions=1, turns=LogNormal(1.0, 1.0)))[0]
    outcome = simulate(RouterScenario([session], SPEC, num_replicas=1, concurrency=1), ours)
    turn = session.turns[0]
    prefill_s = COST.fixed_s + COST.prefill_fixed_s + COST.prefill_token_s * turn.input_tokens
    decode_s = (COST.fixed_s + COST.decode_token_s) * (turn.output_tokens - 1)
    assert outcome.latencies_s == pytest.approx([prefill_s + decode_s])
    assert outcome.first_token_s == pytest.approx([prefill_s])


@settings(max_examples=15, deadline=None)
@given(
    kills=st.lists(
        st.tuples(st.floats(0.1, 6.0), st.integers(0, 2), st.floats(0.1, 3.0), st.floats(0.0, 1.0)),
        max_size=5,
    )
)
def test_random_deaths_lose_no_request(kills: list[tuple[float, int, float, float]]) -> None:
    planned = [Kill(at, f"replica-{n}", back, noticed) for at, n, back, noticed in kills]
    scenario = RouterScenario(SESSIONS[:25], SPEC, num_replicas=3, concurrency=12, kills=planned)
    outcome = simulate(scenario, ours)
    assert outcome.answered == sum(len(session.turns) for session in SESSIONS[:25])
    assert outcome.output_tokens == sum(session.output_tokens for session in SESSIONS[:25])


def test_a_scenario_is_open_or_closed() -> None:
    with pytest.raises(ConfigError, match="arrivals_per_s or concurrency"):
        RouterScenario(SESSIONS, SPEC)


def test_step_costs_are_fitted_from_the_sums_of_steps_and_never_negative() -> None:
    generator = np.random.default_rng(0)
    gram, moment = np.zeros((4, 4)), np.zeros(4)
    for _ in range(400):
        prefilled = float(generator.integers(1, 500)) if generator.random() < 0.3 else 0.0
        features = np.array((1.0, generator.integers(0, 32), prefilled > 0, prefilled))
        seconds = features @ np.array((0.002, 0.0003, 0.0, 0.0001)) + generator.normal(0, 1e-5)
        gram += np.outer(features, features)
        moment += features * seconds
    cost = fit_step_cost(gram, moment)
    assert cost.fixed_s == pytest.approx(0.002, rel=0.05)
    assert cost.decode_token_s == pytest.approx(0.0003, rel=0.05)
    assert cost.prefill_token_s == pytest.approx(0.0001, rel=0.05)
    assert cost.prefill_fixed_s >= 0.0


def test_a_file_without_a_step_cost_is_refused(tmp_path) -> None:
    path = tmp_path / "cost.json"
    path.write_text('{"fixed_s": 0.1}')
    with pytest.raises(ConfigError, match="coefficients"):
        read_step_cost(path)
    path.write_text('{"fixed_s": 0.1, "decode_token_s": 0.2, "prefill_fixed_s": 0, "prefill_token_s": 0.3}')
    assert read_step_cost(path).decode_token_s == 0.2
