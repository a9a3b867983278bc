"""The simulation: small bursts against what can be computed."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from benchmarks.simulation.fleet.scenario import Latencies, Latency, Scenario
from benchmarks.simulation.fleet.simulation import simulate

from etude.sandbox.errors import CapacityError
from etude.sandbox.fleet.hosts import Capacity, Policy
from etude.sandbox.types import Resources

SMALL = Scenario(
    num_sandboxes=1000,
    num_hosts=10,
    capacity=Capacity(16, 64 << 30, 1 << 40),
    demand=Resources(memory_bytes=256 << 20),
)


def test_latencies_have_the_quantiles_that_were_measured():
    latency = Latency(0.0044, 0.0078)
    source = random.Random(0)
    samples = [latency.sample(source) for _ in range(20_000)]
    assert statistics.median(samples) == pytest.approx(0.0044, rel=0.02)
    assert statistics.quantiles(samples, n=10)[-1] == pytest.approx(0.0078, rel=0.03)
    assert statistics.fmean(samples) == pytest.approx(latency.mean_s, rel=0.02)


def test_the_same_scenario_has_the_same_outcome():
    first, again = simulate(SMALL), simulate(SMALL)
    assert replace(first, scheduler_s=0.0) == replace(again, scheduler_s=0.0)
    assert simulate(replace(SMALL, seed=1)).burst_s != first.burst_s


def test_a_burst_is_bound_by_the_control_plane():
    outcome = simulate(replace(SMALL, latencies=Latencies(dispatch_s=1e-3)))
    assert outcome.bound == ("control plane", pytest.approx(1.0))
    assert 1.0 <= outcome.burst_s < 1.2


def test_deaths_lose_sandboxes_which_are_all_started_again():
    scenario = replace(SMALL, latencies=Latencies(dispatch_s=1e-3))
    healthy = simulate(scenario)
    dying = replace(scenario, death_fraction=0.2, death_at_s=healthy.burst_s / 2)
    outcome = simulate(dying)
    assert 100 < outcome.lost < 350
    assert outcome.num_placements >= 1000 + outcome.lost
    latencies = scenario.latencies
    noticed_s = latencies.missed_heartbeats * latencies.heartbeat_s
    assert outcome.recover_s > noticed_s
    assert outcome.burst_s >= dying.death_at_s + noticed_s


def test_a_death_after_the_burst_is_lived_through_too():
    outcome = simulate(replace(SMALL, death_fraction=0.1, death_at_s=60.0))
    assert outcome.lost > 50
    assert outcome.burst_s > 60.0


def test_more_choices_balance_better():
    def spread(choices: int) -> float:
        policy = Policy(choices=choices)
        return simulate(replace(SMALL, num_hosts=30, policy=policy)).promised_spread

    assert spread(4) < spread(1) / 2


def test_a_burst_that_does_not_fit_says_so():
    with pytest.raises(CapacityError, match="does not end"):
        simulate(replace(SMALL, num_hosts=2, limit_s=200.0))
