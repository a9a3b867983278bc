"""What a run was begun with it goes on with, or says why not, before anything is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.config import RunConfig
from etude.controller.compute import settle_compute
from etude.controller.starting import check_start
from etude.errors import ConfigError, ResourceError
from etude.inference.native import load_library
from etude.observe import RunDirectory
from etude.observe.observer import RecordingObserver


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("CC", str(tmp_path / "missing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def new_run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(RunConfig(runs_directory=str(tmp_path / "runs"), num_threads=1))


def test_without_a_compiler_a_new_run_says_that_it_samples_slowly(no_compiler: None, tmp_path: Path) -> None:
    run, observer = new_run(tmp_path), RecordingObserver()
    assert settle_compute(run, run.config, observer).engine.kernels == "eager"
    assert run.environment["kernels"] == "eager"
    assert any("several times slower" in text for text in observer.lines)


def test_a_run_that_began_with_native_kernels_does_not_go_on_without_them_unasked(
    no_compiler: None, tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    run.update_environment({"kernels": "native", "compute_threads": 1})
    with pytest.raises(ResourceError) as caught:
        settle_compute(run, run.config, RecordingObserver())
    assert caught.value.field == "engine.kernels"
    assert run.environment["kernels"] == "native"
    engine = run.config.engine.model_copy(update={"kernels": "eager"})
    asked = run.config.model_copy(update={"engine": engine})
    assert settle_compute(run, asked, RecordingObserver()).engine.kernels == "eager"


def test_a_run_that_began_eager_stays_eager(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.update_environment({"kernels": "eager"})
    assert settle_compute(run, run.config, RecordingObserver()).engine.kernels == "eager"


def test_what_would_end_a_run_at_once_is_refused_before_it_has_a_directory(
    no_compiler: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_start(RunConfig(initial_checkpoint=str(tmp_path)))
    assert caught.value.field == "initial_checkpoint"
    with pytest.raises(ResourceError):
        check_start(RunConfig.model_validate({"engine": {"kernels": "native"}}))
    check_start(RunConfig())
