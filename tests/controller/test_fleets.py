"""Runs whose sandboxes are on several servers: their list, and what a server that is killed costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etude.config import RunConfig, SandboxConfig, SandboxServerConfig, dump_config, parse_config
from etude.controller.backends import ListedServers, check_run_backend, open_fleet, open_run_backend
from etude.errors import ConfigError
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.store.trajectories import TrajectoryLog
from etude_quickstart.memory_backend import MemoryBackend
from tests.controller.running import num_rl_steps, run_elsewhere, wait_until
from tests.controller.sandbox_servers import sandbox_servers
from tests.controller.test_fork_run import check_forks, forking_config
from tests.sandbox.serving import TOKEN, build_app, served

VARIABLE = "ETUDE_TEST_SANDBOX_TOKEN"
SOURCE = f"env:{VARIABLE}"


def test_several_servers_stand_in_a_configuration_by_name() -> None:
    config = parse_config({"sandbox": {"servers": {"a": {"url": "http://a:1"}, "b": {"url": "https://b"}}}})
    assert parse_config(RunConfig.model_validate(config.model_dump()).model_dump()) == config
    assert '[sandbox.servers.a]\nurl = "http://a:1"' in dump_config(config)
    with pytest.raises(ConfigError, match=r"sandbox\.servers\.a\.url: must begin with http.*received 'a:1'"):
        parse_config({"sandbox": {"servers": {"a": {"url": "a:1"}}}})
    with pytest.raises(ConfigError, match=r"sandbox\.servers: a server's name .* no colon, received 'a:1'"):
        parse_config({"sandbox": {"servers": {"a:1": {"url": "http://a:1"}}}})
    with pytest.raises(ConfigError, match=r"server, servers, servers_file: set only one of them"):
        parse_config({"sandbox": {"server": "http://a:1", "servers_file": "servers.toml"}})


@contextlib.asynccontextmanager
async def two_servers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[dict[str, str]]:
    monkeypatch.setenv(VARIABLE, TOKEN)
    async with (
        served(build_app({"local": MemoryBackend()}, TOKEN)) as first,
        served(build_app({"local": MemoryBackend()}, TOKEN)) as second,
    ):
        yield {"a": first, "b": second}


def listing(urls: dict[str, str]) -> str:
    return "".join(f'[servers.{name}]\nurl = "{url}"\ntoken = "{SOURCE}"\n' for name, url in urls.items())


def test_a_run_begins_only_if_all_servers_work_and_goes_on_while_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        async with two_servers(monkeypatch) as urls:
            servers = {name: SandboxServerConfig(url=url, token=SOURCE) for name, url in urls.items()}
            whole = SandboxConfig(servers=servers)
            await asyncio.to_thread(check_run_backend, whole)
            lame = SandboxConfig(servers={**servers, "c": SandboxServerConfig(url="http://127.0.0.1:9")})
            with pytest.raises(ConfigError, match=r"sandbox\.servers: .*c: .*connection .* failed"):
                await asyncio.to_thread(check_run_backend, lame)
            backend = await asyncio.to_thread(open_run_backend, lame, "run")
            sandbox = await backend.create()
            assert sandbox.id.startswith(("a:", "b:"))
            assert (await sandbox.get_info()).metadata == {"owner": "run"}
            await backend.close()
            refused = {name: one.model_copy(update={"token": ""}) for name, one in servers.items()}
            with pytest.raises(ConfigError, match=r"cannot create sandboxes: a: .*token.*; b: .*token"):
                await asyncio.to_thread(open_run_backend, SandboxConfig(servers=refused), "run")

    asyncio.run(scene())


def test_a_file_of_servers_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    file = tmp_path / "servers.toml"
    with pytest.raises(ConfigError, match=r"sandbox\.servers_file: cannot be read"):
        ListedServers(file).read()
    file.write_text(listing({"a": "http://a:1"}))
    listed = ListedServers(file)
    assert {name: (one.url, one.token) for name, one in listed.read().items()} == {"a": ("http://a:1", TOKEN)}
    assert listed.read_changes() is None
    file.write_text(listing({"b": "http://b:1"}) + "draining = true\nmemory_bytes = 1024\n")
    changed = listed.read_changes()
    assert changed is not None
    assert (changed["b"].draining, changed["b"].capacity) == (True, {"memory_bytes": 1024})
    unknown = listing({"b": "http://b"}) + "colour = 1\n"
    for broken in ("", "[servers.b", "[servers.b]\nurl = 1\n", unknown):
        file.write_text(broken)
        with pytest.warns(UserWarning, match="sandbox servers is not updated"):
            assert listed.read_changes() is None
        assert listed.read_changes() is None, "said once"
    file.unlink()
    with pytest.warns(UserWarning, match="is not updated: .*No such file"):
        assert listed.read_changes() is None


def test_a_run_takes_a_server_that_is_listed_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with two_servers(monkeypatch) as urls:
            file = tmp_path / "servers.toml"
            file.write_text(listing({"a": urls["a"]}))
            fleet = open_fleet(SandboxConfig(servers_file=str(file)), "run")
            first = await fleet.create()
            file.write_text(listing({"b": urls["b"]}))
            async with asyncio.timeout(60.0):
                while "b" not in fleet.registry.hosts:  # noqa: ASYNC110 (nobody tells of it)
                    await asyncio.sleep(0.05)
            second = await fleet.create()
            assert (first.id[:2], second.id[:2]) == ("a:", "b:")
            await fleet.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_server_that_is_killed_costs_the_sessions_on_it_an_attempt_and_another_takes_its_place(
    tmp_path: Path,
) -> None:
    with sandbox_servers(tmp_path, 3) as (first, second, third):
        file = tmp_path / "servers.toml"
        file.write_text(first.section("first") + second.section("second"))
        tree = forking_config(tmp_path / "runs").model_dump(mode="json", exclude_none=True)
        tree["sandbox"] |= {"servers_file": str(file)}
        config = RunConfig.model_validate(tree)
        with run_elsewhere(config) as process:
            wait_until(process, lambda: num_rl_steps(config) >= 1 and first.num_live() >= 6)
            first.kill()
            file.write_text(second.section("second", draining=True) + third.section("third"))
            output = process.communicate(timeout=300)[0]
            assert process.returncode == 0, output
        assert third.num_created() > 0
        assert second.num_live() == third.num_live() == 0, "the run leaves nothing there"
    run = RunDirectory.open(Path(config.runs_directory) / config.name)
    check_forks(run)
    report = run.read_json(run.report_file)
    assert report["rl_steps"] == config.rl.num_steps
    members = [member for group in TrajectoryLog(run.trajectories).read() for member in group.members]
    assert all(member.reward is not None for member in members), "no session was lost"
    assert 1 <= max(member.attempt for member in members) < 3, "those of the killed server began anew"
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
    assert len(rows) == config.rl.num_steps
