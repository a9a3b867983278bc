"""A cluster's interpretation of the run's description when it joins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from etude.agent import open_renderer
from etude.config import AgentConfig, RunConfig
from etude.controller.clusters.control import Control
from etude.controller.clusters.intake import Inbox
from etude.controller.clusters.joining import configure_from_run, open_resources
from etude.controller.clusters.runner import describe_run
from etude.controller.compute import resolve_numerics
from etude.controller.models import resolve_model
from etude.errors import InfrastructureError
from etude.model.loading import load_any_model
from etude.records import PolicyVersion
from etude.tokens.tokenizer import Tokenizer
from etude.weights import open_publisher
from tests.controller.running import tiny_config
from tests.controller.test_vllm_run import checkpoint, small_model

_PADDING = 61


def padded_run(directory: Path) -> RunConfig:
    """Settled; its checkpoint has more rows than its tokenizer has tokens."""
    initial = checkpoint(directory / "initial", lambda num_tokens: small_model(num_tokens + _PADDING))
    config = tiny_config(
        directory,
        initial_checkpoint=str(initial),
        sandbox={"backend": "unisolated"},
        weights={"url": str(directory / "store")},
    )
    return resolve_numerics(resolve_model(config))


def said_by(config: RunConfig, directory: Path) -> dict[str, Any]:
    """What that run tells clusters."""
    assert config.initial_checkpoint is not None
    renderer = open_renderer(Tokenizer.load(Path(config.initial_checkpoint)), AgentConfig())
    inbox = Inbox(directory / "inbox", 1 << 16)
    return Control(config.clusters, describe_run(config, renderer), inbox).run()


def test_a_cluster_samples_a_checkpoint_with_more_rows_than_its_tokenizer_has_tokens(tmp_path: Path) -> None:
    settled = padded_run(tmp_path)
    (tmp_path / "there").mkdir()
    told = said_by(settled, tmp_path)
    store = f"weights.read_url={settled.weights.url}"
    config, tokenizer, model = configure_from_run(
        told, tmp_path / "there", [store, "sandbox.backend=unisolated"]
    )
    assert config.initial_checkpoint is None
    assert model.vocab_size == tokenizer.vocab_size + _PADDING

    async def run() -> None:
        trained = load_any_model(tmp_path / "initial")
        with open_publisher(settled.weights) as publisher:
            manifest = publisher.publish(PolicyVersion("run", 3), dict(trained.named_parameters()))
        async with open_resources(config, tokenizer, model, "frankfurt") as resources:
            await resources.sink.stage(manifest)
            await resources.sink.activate(manifest.version)
            resources.check()

    asyncio.run(run())


@pytest.mark.parametrize("told", [{}, {"vocab_size": "many"}])
def test_a_run_that_does_not_say_what_it_samples_is_none(tmp_path: Path, told: dict[str, Any]) -> None:
    document = said_by(padded_run(tmp_path), tmp_path)
    del document["vocab_size"]
    (tmp_path / "there").mkdir()
    with pytest.raises(InfrastructureError, match="description is invalid"):
        configure_from_run({**document, **told}, tmp_path / "there", [])
