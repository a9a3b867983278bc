"""Our ATIF files under the Harbor project's own models, where its package is installed."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from etude.records import Trajectory
from etude.store import trajectory_to_atif
from tests.store.builders import make_chain, trajectories, trees

harbor: Any = pytest.importorskip("harbor.models.trajectories", reason="the package harbor is not installed")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_trees_are_valid(trajectory: Trajectory) -> None:
    document = trajectory_to_atif(trajectory)
    assert harbor.Trajectory(**document).schema_version == document["schema_version"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trajectories())
def test_whatever_can_be_recorded_is_valid(trajectory: Trajectory) -> None:
    harbor.Trajectory(**trajectory_to_atif(trajectory))


def test_a_chain_is_valid_and_has_its_steps() -> None:
    document = trajectory_to_atif(make_chain(3), instruction="fix it")
    read = harbor.Trajectory(**document)
    assert len(read.steps) == 9
    assert read.final_metrics.total_steps == 9
