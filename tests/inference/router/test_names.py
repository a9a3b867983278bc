"""A web page that points its own name at this machine reaches neither a router nor a server without keys."""

from __future__ import annotations

import httpx
import pytest

from tests.inference.router.threads import in_thread, routing

FOREIGN = [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}]
CREDENTIALS = [{}, {"authorization": "Bearer anything"}]


@pytest.mark.parametrize("credentials", CREDENTIALS)
@pytest.mark.parametrize("names", FOREIGN)
def test_a_router_is_reached_by_its_own_names_only(
    names: dict[str, str], credentials: dict[str, str]
) -> None:
    with in_thread(routing([])) as url:
        for method, path in (
            ("GET", "/router/replicas"),
            ("POST", "/router/replicas"),
            ("POST", "/v1/chat/completions"),
        ):
            body = {"url": "http://127.0.0.1:1"} if method == "POST" else None
            answer = httpx.request(method, url + path, json=body, headers=names | credentials)
            assert (answer.status_code, set(answer.json()["error"])) == (
                401,
                {"message", "type", "param", "code"},
            )
        assert httpx.get(f"{url}/router/replicas", headers=credentials).json() == {"replicas": []}
