"""What `etude route` refuses, serves and shows, in front of fake replicas."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import serve_load
from etude.cli.exits import EXIT_MISTAKE
from etude.inference.router import Replica
from etude.inference.router.server import Proxy, admin
from etude.kit.ports import free_port
from tests.cli.commands import etude, option_names
from tests.fakes.replica import FakeReplica, fake_replica
from tests.inference.router.threads import in_thread, routing


def served(replica: FakeReplica) -> AbstractContextManager[str]:
    """The replica's address; it runs in a thread of its own."""
    return in_thread(fake_replica(replica))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--replica", "nowhere"), "replica"),
        (("--replica", "http://h:port"), "replica"),
        (("--config", "/nowhere/at/all.toml"), "config"),
        (("--lend", "serve,serve,1,22:00-06:00"), "--lend"),
        (("--lend", "a,b,1,22:00-06:00", "--lend-by-load", "a,b,1,3-9"), "--lend-by-load"),
        (("--replica", ""), "url"),
        (("--replica", "http://h:1", "--pool", ""), "pool"),
        (("--replica", "http://h:1", "--arm", "run@1"), "--arm"),
        (("--replica", "http://h:1", "--arm", "run@1=-2"), "--arm"),
        (("--replica", "http://h:1", "--host", "0.0.0.0"), "host"),
        (("--replica", "http://h:1", "--lend", "serve,rollout"), "--lend"),
        (("--replica", "http://h:1", "--lend", "serve,rollout,1,25:00-06:00"), "--lend"),
        (("--replica", "http://h:1", "--lend-by-load", "serve,rollout,1,9"), "--lend-by-load"),
        (("--replica", "http://h:1", "--lend-by-load", "serve,rollout,1,9-3"), "--lend-by-load"),
    ],
)
def test_mistakes_in_a_route_are_named(arguments: tuple[str, ...], field: str) -> None:
    done = etude("route", *arguments)
    assert done.exit_code == EXIT_MISTAKE
    assert field in done.stderr


def test_options_win_over_the_file_and_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Proxy] = []

    def note(proxy: Proxy, *_: Any) -> None:
        started.append(proxy)

    monkeypatch.setattr("etude.inference.router.server.serve", note)
    path = tmp_path / "router.toml"
    path.write_text(
        'port = 7000\npool = "rollout"\n[[replicas]]\nurl = "http://h:1"\n[arms]\n"run@7" = 0.25\n'
        "[limits]\nanswer_s = 50.0\nhedge_after_s = 2.0\n[health]\neject_after = 5\n"
        '[[lending.by_load]]\nlender = "a"\nborrower = "b"\nbusy_tokens = 9\nidle_tokens = 3\n'
    )
    assert etude("route", "--config", str(path)).exit_code == 0
    more = (
        "--port",
        "7001",
        "--replica",
        "http://h:2,serve",
        "--answer-s",
        "60",
        "--lend",
        "a,b,1,22:00-06:00",
    )
    assert etude("route", "--config", str(path), *more).exit_code == 0
    plain, changed = started
    asked = [[(one.url, one.pool) for one in proxy.config.replicas] for proxy in started]
    assert asked == [[("http://h:1", "")], [("http://h:2", "serve")]]
    assert (plain.config.port, changed.config.port) == (7000, 7001)
    assert [one.config.limits.answer_s for one in (plain, changed)] == [50.0, 60.0]
    for proxy in (plain, changed):
        assert (proxy.config.pool, proxy.config.limits.hedge_after_s) == ("rollout", 2.0)
        assert proxy.members.config.eject_after == 5
        assert proxy.router.arms == {"run@7": 0.25}
    idle = [Replica("x", "a", "a"), Replica("y", "a", "a"), Replica("z", "b", "b", work=10)]
    assert [one.pool for one in plain.lender.moves(idle, 0.0, 12 * 3600.0)] == ["b"]
    assert changed.lender.moves(idle, 0.0, 12 * 3600.0) == []
    assert [one.pool for one in changed.lender.moves(idle, 0.0, 23 * 3600.0)] == ["b"]


def test_every_option_and_path_of_the_routing_page_exists() -> None:
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text(encoding="utf-8")
    option, load = re.compile(r"(?<![\w-])--[a-z][a-z-]+"), serve_load.build_parser().format_help()
    known = option_names("route") | option_names("route", "lend") | option_names("serve")
    commands = (line for line in page.splitlines() if "benchmarks/" not in line or "serve_load" in line)
    assert set(option.findall("\n".join(commands))) <= known | set(option.findall(load))
    routed = {(method, route.path) for route in admin.router.routes for method in route.methods}
    told = set(re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/router/[a-zA-Z/]+)", page))
    assert {(method, path.replace("NAME", "{name}")) for method, path in told} == routed


@pytest.mark.slow
def test_a_route_serves_a_load_and_ends_when_it_is_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    replicas = [FakeReplica(token_s=0.001), FakeReplica(token_s=0.001)]
    with served(replicas[0]) as first, served(replicas[1]) as second:
        port = free_port()
        code = "from etude.cli import main; main()"
        arguments = ["route", "--replica", first, "--replica", f"{second},serve", "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        route = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            end_s = time.monotonic() + 60.0
            while time.monotonic() < end_s and not _ready(url):
                time.sleep(0.1)
            assert serve_load.main([url, "--sessions", "4", "--output", "4-8", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["errors"] == {}
            assert all(replica.requests for replica in replicas)
            route.send_signal(signal.SIGTERM)
            assert route.wait(60.0) == 0
        finally:
            route.kill()
            route.wait()


def _ready(url: str) -> bool:
    try:
        rows = httpx.get(f"{url}/router/replicas", trust_env=False).json()["replicas"]
    except httpx.TransportError:
        return False
    return all(row["state"] == "ready" for row in rows)


def test_replicas_are_shown_and_moved_by_hand() -> None:
    with served(FakeReplica()) as first, in_thread(routing([first])) as url:
        name = first.removeprefix("http://")
        lent = etude("route", "lend", name, "--router", url)
        assert f"{name}: ready, rollout (of serve), by hand" in lent.stdout
        row = json.loads(etude("route", "replicas", "--router", url, "--json").stdout)[0]
        assert (row["pool"], row["by_hand"], row["borrower"]) == ("rollout", True, None)
        assert ", serve, by hand" in etude("route", "recall", name, "--router", url).stdout
        assert ", serve, fake@0" in etude("route", "release", name, "--router", url).stdout
        refused = etude("route", "lend", "h:1", "--router", url)
        assert refused.exit_code == EXIT_MISTAKE
        assert "no such replica" in refused.stderr
    assert "does not answer" in etude("route", "replicas", "--router", url).stderr
