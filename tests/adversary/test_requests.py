"""Hostile requests to all seven servers: none crashes or stalls one, or reveals another tenant's data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs etude[serve]")
pytest.importorskip("httpx", reason="needs etude[serve]")

from tests.adversary import kinds_inference, kinds_sandbox
from tests.adversary.kinds import KINDS, Kind
from tests.adversary.sending import exchange
from tests.adversary.servers import OTHER_TOKEN, SECRET, Pulse, Server, serving

_STALL_S = 1.0
assert kinds_inference and kinds_sandbox, "they add their kinds to the table"
PARAMETERS = [pytest.param(k, id=k.name, marks=[pytest.mark.slow] if k.slow else []) for k in KINDS]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """All of them, for all requests: what one request breaks, the next ones meet."""
    with serving(tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.mark.parametrize("kind", PARAMETERS)
def test_a_hostile_request_neither_breaks_nor_holds_up_nor_shows_anything(
    servers: dict[str, Server], kind: Kind
) -> None:
    for name in kind.servers:
        server = servers[name]
        with Pulse(server) as pulse:
            answers = exchange(server, kind.data(server), kind.waits)
        for answer in answers:
            assert answer.status in kind.expect, f"{name}: {answer.status} {answer.text[:500]}"
            assert answer.status != 503 or "retry-after" in answer.headers, name
            assert SECRET not in answer.text and OTHER_TOKEN not in answer.text, name
        assert pulse.failure is None, f"{name}: {pulse.failure}"
        assert pulse.longest_s < _STALL_S, f"{name}: no answer for {pulse.longest_s:.1f} s"


def test_the_kinds_are_many_and_none_stands_twice() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 150
