"""Schemathesis sends each server what its OpenAPI description allows and forbids, and finds nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs etude[serve]")
pytest.importorskip("httpx", reason="needs etude[serve]")

from benchmarks.environments import is_made, python_of

from tests.adversary.servers import SERVERS, Server, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.foreign,
    pytest.mark.skipif(
        not is_made("schemathesis"),
        reason="schemathesis is not installed: python benchmarks/environments.py schemathesis",
    ),
]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LIMIT_S = 600


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    with serving(tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.mark.parametrize("name", SERVERS)
def test_schemathesis_finds_nothing(servers: dict[str, Server], name: str) -> None:
    server = servers[name]
    program = python_of("schemathesis").with_name("schemathesis")
    options = ("--checks", CHECKS, "--phases", "fuzzing", "-n", "5", "--seed", "1", "--no-color")
    headers = ("-H", f"Authorization: Bearer {server.token}")
    done = subprocess.run(
        [program, "run", f"{server.url}/openapi.json", *headers, *options],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
