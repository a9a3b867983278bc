"""The router as a process, and what its commands import."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from etude.config import RouterConfig
from etude.errors import ConfigError
from etude.inference.router.server import Proxy, serve
from etude.serving.listening import open_listeners
from tests.fakes.replica import FakeReplica, fake_replica

_LIMIT_S = 120.0
_HEAVY = ("torch", "transformers", "etude.inference.engine")


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        "sys.argv = ['etude', 'route', '--help']; main()",
        "import etude.inference.router.server.app",
    ],
)
def test_routing_imports_no_torch(run: str) -> None:
    run_python(
        "import sys\nfrom etude.cli import main\n"
        f"try:\n    {run}\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"found = [name for name in {_HEAVY} if name in sys.modules]\nassert not found, found\n"
    )


@pytest.mark.slow
def test_names_of_the_package_come_when_they_are_used() -> None:
    run_python(
        "import sys, etude.inference as package\n"
        "assert 'torch' not in sys.modules\n"
        "names = [name for name in dir(package) if name[0] != '_' and name in package._MODULES]\n"
        "assert len(names) > 8 and [getattr(package, name).__name__ for name in names] == names\n"
        "assert not hasattr(package, 'Nothing')\n"
    )


def test_an_address_that_others_reach_and_a_port_that_is_taken_are_told() -> None:
    with pytest.raises(ConfigError, match="checks no keys"):
        serve(Proxy(RouterConfig(host="0.0.0.0")))
    (taken,) = open_listeners("127.0.0.1", 0)
    with taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"end the process that uses port {port}"):
            serve(
                Proxy(
                    RouterConfig.model_validate({"port": port, "replicas": [{"url": "http://127.0.0.1:9"}]})
                )
            )


async def _serve_one_answer(replica: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from etude.cli import main; main()"),
        *("route", "--replica", replica, "--port", "0", "--probe-s", "0.05"),
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parents[3],
    )
    try:
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        match = re.fullmatch(r"router: ready at (http://127\.0\.0\.1:\d+); 1 replica\n", line)
        assert match, line
        async with httpx.AsyncClient(base_url=match[1], timeout=60.0) as http:
            while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            body = {"model": "fake", "prompt": "a b", "max_tokens": 3}
            # A replica that was silent for a while is ejected, and comes back.
            while (answer := await http.post("/v1/completions", json=body)).status_code == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert len(answer.json()["choices"][0]["text"].split()) == 3
        process.send_signal(signal.SIGTERM)
        rest = (await process.stderr.read()).decode()
        assert await process.wait() == 0 and rest.startswith("router: shutting down when its answers"), rest
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
def test_a_router_says_where_it_is_ready_answers_and_ends_at_a_signal() -> None:
    async def run() -> None:
        async with fake_replica(FakeReplica()) as replica:
            await _serve_one_answer(replica)

    asyncio.run(asyncio.wait_for(run(), _LIMIT_S))
