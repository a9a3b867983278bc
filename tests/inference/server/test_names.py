"""A web page that points its own name at this machine reaches no server without keys."""

from __future__ import annotations

import httpx
import pytest

from tests.inference.router.test_names import CREDENTIALS, FOREIGN
from tests.inference.server.serving import PlayedSampler, make_state, serving


@pytest.mark.parametrize("credentials", CREDENTIALS)
@pytest.mark.parametrize("names", FOREIGN)
def test_a_server_is_reached_by_its_own_names_only(
    names: dict[str, str], credentials: dict[str, str]
) -> None:
    with serving(make_state(PlayedSampler(lambda context: "word"))) as served:
        answer = httpx.get(f"{served.url}/v1/models", headers=names | credentials)
        assert (answer.status_code, set(answer.json()["error"])) == (
            401,
            {"message", "type", "param", "code"},
        )
        assert httpx.get(f"{served.url}/v1/models", headers=credentials).status_code == 200
