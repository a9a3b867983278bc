from __future__ import annotations

import asyncio

import pytest
from elastic import simulated


@pytest.mark.slow
def test_a_borrowed_replica_brings_trajectories_and_costs_users_no_answer() -> None:
    figures = asyncio.run(simulated(4.0, 1))
    assert figures["borrowed_tokens"] > 0, "how much faster it is depends on the machine"
    for phase in ("alone", "lent", "returned"):
        assert figures[f"users_errors_{phase}"] == 0.0
    assert figures["simulated_recall_to_first_token_ms"] > 0.0
