"""A resumed run keeps its compute settings, or is refused with the reason before anything is created."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from etude.config import RunConfig
from etude.controller.compute import (
    Place,
    choose_place,
    choose_weight_dtype,
    place_model,
    resolve_compute,
    resolve_evaluation,
)
from etude.controller.starting import check_start
from etude.errors import ConfigError, ResourceError, StoreError, TaskError, UserError
from etude.model import LanguageModel
from etude.model.kernels.native import load_library
from etude.model.language_model import block_of
from etude.observe import RunDirectory
from etude.observe.observer import RecordingObserver
from tests.model.builders import small_model

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


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
    assert resolve_compute(run, run.config, observer).engine.kernels == "eager"
    assert run.environment["kernels"] == "eager"
    assert any("several times slower" in text for text in observer.lines)


def test_a_run_that_began_with_native_kernels_does_not_go_on_without_them_unasked(
    no_compiler: None, tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    run.update_environment({"device": "cpu", "kernels": "native", "compute_threads": 1})
    with pytest.raises(ResourceError) as caught:
        resolve_compute(run, run.config, RecordingObserver())
    assert caught.value.field == "engine.kernels"
    assert run.environment["kernels"] == "native"
    engine = run.config.engine.model_copy(update={"kernels": "eager"})
    asked = run.config.model_copy(update={"engine": engine})
    assert resolve_compute(run, asked, RecordingObserver()).engine.kernels == "eager"


def test_a_run_that_began_eager_stays_eager(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.update_environment({"device": "cpu", "kernels": "eager"})
    assert resolve_compute(run, run.config, RecordingObserver()).engine.kernels == "eager"


def test_what_would_end_a_run_at_once_is_refused_before_it_has_a_directory(
    no_compiler: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_start(RunConfig(initial_checkpoint=str(tmp_path)))
    assert caught.value.field == "initial_checkpoint"
    with pytest.raises(ResourceError):
        check_start(RunConfig.model_validate({"engine": {"kernels": "native"}}))
    for section, field in (
        ({"parallel": {"ranks": 3, "expert": 3}}, "parallel.expert"),
        ({"parallel": {"ranks": 2, "expert": 2}, "model": {"architecture": "qwen3"}}, "parallel.expert"),
        ({"rl": {"reward": {"custom": {"etude.nowhere:term": 1.0}}}}, "rl.reward.custom"),
        ({"engine": {"cache_tokens": 640}}, "engine.cache_tokens"),
        ({"engine": {"drafts": "mtp", "speculative_tokens": 2}}, "engine.drafts"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_start(RunConfig.model_validate(section))
        assert caught.value.field == field
    for trails, field in (
        ({"trail_lengths": [9, 3]}, "tasks.trail_lengths"),
        ({"trail_lengths_at_end": [9, 3]}, "tasks.trail_lengths_at_end"),
        ({"trail_heldout_lengths": [40, 5000]}, "tasks.trail_heldout_lengths"),
    ):
        with pytest.raises(TaskError) as refused:
            check_start(RunConfig.model_validate({"tasks": {"family": "trails", **trails}}))
        assert refused.value.field == field
    with pytest.raises(StoreError, match=r"weights\.url"):
        check_start(RunConfig.model_validate({"weights": {"url": "ftpx://nowhere"}}))
    borrowing = {"router": "http://h:1", "token": f"file:{tmp_path / 'missing'}"}
    with pytest.raises(ConfigError, match=r"elastic\.token"):
        check_start(RunConfig.model_validate({"weights": {"url": str(tmp_path)}, "elastic": borrowing}))
    check_start(RunConfig())


@needs_no_gpu
@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"device": "cuda"}, ResourceError, "device"),
        ({"device": "cuda", "numerics": "invariant"}, ConfigError, "device"),
        ({"dtype": "bfloat16"}, ConfigError, "dtype"),
        ({"kernels": "gpu"}, ConfigError, "engine.kernels"),
        ({"device": "cpu", "kernels": "gpu"}, ConfigError, "engine.kernels"),
    ],
)
def test_what_does_not_fit_together_or_cannot_be_had_is_refused_by_its_field(
    options: dict[str, Any], error: type[UserError], field: str
) -> None:
    with pytest.raises(error) as caught:
        choose_place(**options)
    assert caught.value.field == field and caught.value.fix


def test_kernels_of_a_cpu_choose_the_cpu() -> None:
    assert choose_place(kernels="eager") == Place("cpu", "float32", "eager")


def test_only_native_kernels_keep_weights_in_another_format_than_the_model() -> None:
    native, eager = (Place("cpu", "float32", kernels) for kernels in ("native", "eager"))
    assert [choose_weight_dtype(w, native) for w in ("auto", "bfloat16")] == ["float32", "bfloat16"]
    assert choose_weight_dtype("auto", Place("cuda", "bfloat16", "gpu")) == "bfloat16"
    with pytest.raises(ConfigError) as caught:
        choose_weight_dtype("bfloat16", eager)
    assert caught.value.field == "engine.weight_dtype" and caught.value.fix


def test_device_and_number_format_are_stored_with_the_run_and_kept(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    asked = run.config.model_copy(update={"device": "cpu"})
    settled = resolve_compute(run, asked, RecordingObserver())
    assert (settled.device, settled.dtype) == ("cpu", "float32")
    assert (run.environment["device"], run.environment["dtype"]) == ("cpu", "float32")
    assert resolve_compute(run, run.config, RecordingObserver()).device == "cpu"


@needs_no_gpu
def test_a_run_that_began_on_a_gpu_goes_on_there_only_but_can_be_judged_elsewhere(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.update_environment({"device": "cuda", "dtype": "bfloat16", "kernels": "gpu", "compute_threads": 1})
    with pytest.raises(ResourceError) as caught:
        resolve_compute(run, run.config, RecordingObserver())
    assert caught.value.field == "device"
    judged = resolve_evaluation(run)
    assert (judged.device, judged.dtype) == ("cpu", "float32")
    assert judged.engine.kernels in ("eager", "native")


def test_on_a_cpu_a_model_stays_as_it_is() -> None:
    model = small_model()
    ops, before = model.ops, {name: p.data_ptr() for name, p in model.named_parameters()}
    assert place_model(model, RunConfig(device="cpu")) is model
    assert model.ops is ops
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


def test_a_placed_model_recomputes_its_activations_if_told_to() -> None:
    for enabled in (True, False):
        model = place_model(small_model(), RunConfig(device="cpu", activation_checkpointing=enabled))
        blocks = [block_of(cast(LanguageModel, model), layer) for layer in range(2)]
        assert {block.recompute for block in blocks} == {enabled}
