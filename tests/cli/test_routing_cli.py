"""`etude bench serve` against a fake replica, and what `etude route` refuses."""

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

from etude.cli.bench import EXIT_ERRORS
from etude.cli.exits import EXIT_MISTAKE
from etude.inference.router import Replica
from etude.inference.router.server import Proxy, admin
from etude.kit.ports import free_port
from etude.records import Segment
from etude.store import TrajectoryLog
from tests.cli.commands import etude, option_names
from tests.fakes.replica import FakeReplica, fake_replica
from tests.inference.router.threads import in_thread, routing
from tests.store.builders import make_group


def served(replica: FakeReplica) -> AbstractContextManager[str]:
    """The replica's address; it runs in a thread of its own."""
    return in_thread(fake_replica(replica))


SMALL = ("--sessions", "4", "--turns", "2", "--prompt", "10-20", "--observation", "3-6", "--output", "4-8")


def test_a_load_prints_a_table_and_json() -> None:
    with served(FakeReplica(token_s=0.001)) as url:
        shown = etude("bench", "serve", url, *SMALL)
        assert shown.exit_code == 0, shown.output
        assert "time to first token" in shown.stdout
        assert "8 turns against fake" in shown.stderr
        report = json.loads(etude("bench", "serve", url, *SMALL, "--json").stdout)
    assert (report["turns"], report["errors"]) == (8, {})
    assert report["output_tokens_per_s"] > 0
    assert 0 < report["cache_hit_rate"] < 1


def test_the_defaults_fit_a_model_of_short_context() -> None:
    with served(FakeReplica(context=767)) as url:
        done = etude("bench", "serve", url, "--sessions", "3", "--json")
    assert done.exit_code == 0, done.output
    assert (json.loads(done.stdout)["turns"], json.loads(done.stdout)["errors"]) == (18, {})
    assert "3 sessions are shortened to the model's context of 767 tokens" in done.stderr


def test_recorded_sessions_are_played(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path).append([make_group(size=2)])
    with served(FakeReplica()) as url:
        done = etude("bench", "serve", url, "--recorded", str(tmp_path), "--json")
    assert json.loads(done.stdout)["errors"] == {}


def test_the_tokens_of_a_run_are_sent_as_they_were_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    group = make_group(size=2)
    TrajectoryLog(tmp_path / "trajectories").append([group])
    replica = FakeReplica()
    with served(replica) as url:
        done = etude("bench", "serve", url, "--recorded", str(tmp_path), "--api", "tokens", "--json")
    assert json.loads(done.stdout)["errors"] == {}
    sent = [tuple(body["prompt"]) for body in replica.requests]
    for member in group.members:
        for segment in member.segments:
            for prompt in _prompts(segment):
                sent.remove(prompt)
    assert not sent, "and nothing else was sent"


def _prompts(segment: Segment) -> list[tuple[int, ...]]:
    """All tokens before each answer of a segment."""
    starts = [n for n in range(1, len(segment.tokens)) if segment.sampled[n] and not segment.sampled[n - 1]]
    return [tuple(segment.tokens[:start].tolist()) for start in starts]


def test_turns_without_an_answer_are_counted_and_make_the_command_fail() -> None:
    replica = FakeReplica()
    with served(replica) as url:
        replica.cut_after = 1
        done = etude("bench", "serve", url, *SMALL, "--model", "fake")
        assert done.exit_code != 0
        replica.cut_after, replica.token_s = None, 0.5
        done = etude("bench", "serve", url, *SMALL, "--turn-limit-s", "0.6")
        assert done.exit_code == EXIT_ERRORS
        assert "error timeout: 4 turns" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--output", "many"), "--output"),
        (("--prompt", "9-3"), "--prompt"),
        (("--turns", "0"), "--turns"),
        (("--output", "40-4"), "--output"),
        (("--rate", "2", "--concurrency", "2"), "--rate"),
        (("--api", "tokens"), "--recorded"),
        (("--api", "soap"), "--api"),
        (("--extra", "[1]"), "--extra"),
        (("--recorded", "/nowhere/at/all"), "recorded"),
        (("--key-file", "/nowhere/at/all"), "--key-file"),
    ],
)
def test_mistakes_in_a_load_are_named(arguments: tuple[str, str], field: str) -> None:
    done = etude("bench", "serve", "http://127.0.0.1:9", *arguments)
    assert done.exit_code == EXIT_MISTAKE
    assert field in done.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    done = etude("bench", "serve", "http://127.0.0.1:9", *SMALL)
    assert done.exit_code == EXIT_MISTAKE
    assert "url" in done.stderr


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
    commands = (["route"], ["route", "lend"], ["serve"], ["bench", "serve"])
    known = set().union(*(option_names(*command) for command in commands))
    page_of_commands = "\n".join(line for line in page.splitlines() if "benchmarks/" not in line)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page_of_commands)) <= known
    routed = {(method, route.path) for route in admin.router.routes for method in route.methods}
    told = set(re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/router/[a-zA-Z/]+)", page))
    assert {(method, path.replace("NAME", "{name}")) for method, path in told} == routed


@pytest.mark.slow
def test_a_route_serves_a_load_and_ends_when_it_is_asked_to() -> None:
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
            done = etude("bench", "serve", url, *SMALL, "--json")
            assert json.loads(done.stdout)["errors"] == {}
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
