"""Whole runs that sample through vLLM's interface, from the fake server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etude.agent import core_registry
from etude.agent.endpoint_messages import byte_tokenizer
from etude.config import ModelConfig, RunConfig
from etude.controller.evaluation import EvaluationRequest, evaluate
from etude.controller.models import resolve_model
from etude.controller.starting import check_start
from etude.controller.train import ROUTES, InterruptedRunError
from etude.errors import ConfigError
from etude.model.huggingface import save_model
from etude.model.language_model import LanguageModel, build_model
from etude.model.loading import AnyModel, save_any_model
from etude.model.transformers_model import TransformersModel
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.observer import SilentObserver
from etude.store.blobs import PermanentBlobs
from etude.store.trajectories import TrajectoryLog
from etude.tokens.grammar import XmlGrammar
from tests.controller.running import run_here, tiny_config
from tests.fakes.vllm import FakeServer
from tests.model import transformers_builders

_SMALL = ModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=2,
    expert_size=8,
    max_positions=600,
)


def small_model(vocab_size: int) -> LanguageModel:
    model = build_model(_SMALL, vocab_size)
    model.initialise(0)
    return model


def glm_model(vocab_size: int) -> TransformersModel:
    return transformers_builders.tiny_model("glm4_moe", vocab_size=vocab_size, num_hidden_layers=2)


def checkpoint(directory: Path, make: Callable[[int], AnyModel]) -> Path:
    """A model that begins a run, with its tokenizer."""
    tokenizer = byte_tokenizer(XmlGrammar(core_registry().schemas).control_tokens())
    save_any_model(make(tokenizer.vocab_size), directory)
    tokenizer.save(directory)
    return directory


@contextlib.contextmanager
def fake_vllm(directory: Path) -> Iterator[str]:
    """The URL of a server that somebody else runs, with some weights or other; in a thread of its own."""
    server = FakeServer(loads_at_start=False)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(directory), loop).result(60)
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def vllm_config(runs: Path, initial: Path, url: str, **sections: object) -> RunConfig:
    values: dict[str, object] = {
        "initial_checkpoint": str(initial),
        "agent": {"max_message_tokens": 8},
        "engine": {"backend": "vllm", "vllm": {"url": url}},
        "rl": {"groups_per_step": 1},
        "evaluation": {"num_tasks": 1, "num_samples": 1},
        "parity": {"num_sequences": 2, "max_tokens": 64},
    }
    return tiny_config(runs, **{**values, **sections})


def served_steps(run: RunDirectory) -> set[int]:
    """Steps of the versions that the stored sessions were sampled with."""
    members = [member for group in TrajectoryLog(run.trajectories).read() for member in group.members]
    spans = [span for member in members for segment in member.segments for span in segment.version_spans]
    return {span.version.step for span in spans}


def check_routes(run: RunDirectory, model: AnyModel) -> None:
    """Every segment of a run that keeps routes has the experts of all positions but its last."""
    blobs, (num_layers, top_k) = PermanentBlobs(run.path / ROUTES), model.routes_shape
    members = [member for group in TrajectoryLog(run.trajectories).read() for member in group.members]
    for segment in (segment for member in members for segment in member.segments):
        assert segment.routes is not None
        routes = blobs.get(segment.routes)
        assert routes.shape == (len(segment.tokens), num_layers, top_k)
        assert int(routes[:-1].max()) < model.num_experts


@pytest.mark.slow
@pytest.mark.parametrize("make", [small_model, glm_model])
def test_a_run_samples_trains_and_reports_through_vllm(
    make: Callable[[int], AnyModel], tmp_path: Path
) -> None:
    initial = checkpoint(tmp_path / "initial", make)
    with fake_vllm(initial) as url:
        config = vllm_config(tmp_path, initial, url)
        check_start(config)
        run, report = run_here(config)
        assert report["rl_steps"] == 2
        assert served_steps(run) == {0, 1}
        assert run.environment["reproducible"] is False
        assert report["throughput"]["decode_tokens"] > 0
        assert report["throughput"]["prefill_tokens"] > 0
        checks = [row for row in read_metrics(run.metrics_file) if row["kind"] == "parity"]
        assert len(checks) == 3 and all(row["k3"] < 1e-6 for row in checks)
        again = evaluate(EvaluationRequest(str(run.path), num_tasks=1), SilentObserver())
        assert again.modes["greedy"].figures["n"] == 1


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_a_server_that_holds_other_weights(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path / "initial", small_model)
    with fake_vllm(initial) as url:
        config = vllm_config(tmp_path, initial, url, max_wall_s=0.001)
        with pytest.raises(InterruptedRunError):
            run_here(config)
    with fake_vllm(initial) as url:
        vllm = config.engine.vllm.model_copy(update={"url": url})
        engine = config.engine.model_copy(update={"vllm": vllm})
        resumed, report = run_here(
            config.model_copy(update={"engine": engine, "max_wall_s": 0.0}), resume=True
        )
        assert report["rl_steps"] == 2
        assert served_steps(resumed) == {0, 1}


def test_a_checkpoint_says_what_the_model_is(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path / "initial", small_model)
    config = RunConfig.model_validate({"initial_checkpoint": str(initial), "agent": {"max_tokens": 600}})
    assert resolve_model(config).model == _SMALL
    longer = config.agent.model_copy(update={"max_tokens": 601})
    with pytest.raises(ConfigError, match="window of 600 tokens"):
        resolve_model(config.model_copy(update={"agent": longer}))


def test_vllm_must_be_named(tmp_path: Path) -> None:
    save_model(small_model(300), tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.vllm\.python"):
        check_start(RunConfig.model_validate({"engine": {"backend": "vllm"}}))
