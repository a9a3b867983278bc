"""Runs over Ray whose weights pass through a store, as they do where machines share no directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.observe import RunDirectory
from tests.controller.running import (
    changed,
    collected,
    final_weights,
    num_rl_steps,
    run_elsewhere,
    run_here,
    wait_until,
)
from tests.controller.test_ray import kill_one, over_ray
from tests.controller.test_resume import learning_config

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run in one process, which the others are compared with."""
    return run_here(learning_config(tmp_path_factory.mktemp("local")))[0]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a bucket on a server of this process that speaks S3, which everything started here finds."""
    pytest.importorskip("s3fs")
    servers = pytest.importorskip("moto.server")
    server = servers.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("etude-run")
    yield "s3://etude-run"
    server.stop()


def test_through_s3_a_run_is_the_one_of_one_process_whoever_dies(
    undisturbed: RunDirectory, bucket: str, tmp_path: Path
) -> None:
    config = changed(over_ray(tmp_path), weights={"url": f"{bucket}/run", "lease_s": 2.0})
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) >= 1)
        assert kill_one("trainer")
        wait_until(process, lambda: num_rl_steps(config) >= 2)
        assert kill_one("engine-0")
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    run = RunDirectory.open(Path(config.runs_directory) / config.name)
    assert final_weights(run) == final_weights(undisturbed)
    assert collected(run) == collected(undisturbed)
    assert not (run.path / "weights").exists(), "no directory is shared"
