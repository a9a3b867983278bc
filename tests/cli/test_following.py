"""A server takes the weights that a run saves while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from etude.cli.following import WeightFollower
from etude.cli.served_model import EngineChoice, open_checkpoint, running_engine
from etude.model import build_model
from etude.model.huggingface import save_model
from etude.records import PolicyVersion
from etude.training import save_checkpoint
from tests.environment.recording.recording_builders import qwen_tokenizer
from tests.inference.server.checkpoint import write_checkpoint
from tests.model.builders import small_config


@pytest.mark.slow
def test_each_new_checkpoint_of_a_run_is_served_and_one_of_another_model_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = write_checkpoint(tmp_path / "served")
    latest, final = (tmp_path / "run" / "checkpoints" / name for name in ("latest", "final"))
    num_rows = qwen_tokenizer().vocab_size
    learned = build_model(small_config(max_positions=600), num_rows)
    learned.initialise(1)
    other = build_model(small_config(max_positions=700), num_rows)
    other.initialise(2)

    async def follow() -> None:
        opened = open_checkpoint(served, None, ("auto", "auto"), 64, 64)
        choice = EngineChoice(2, 1 << 22, "eager", 0)
        async with running_engine(opened, PolicyVersion("run", 0), choice) as engine:
            follower = WeightFollower(engine, tmp_path / "run", engine.manifest.version)
            await follower.look()
            assert str(engine.service.current()) == "run@0"
            latest.parent.mkdir(parents=True)
            save_checkpoint(latest, learned)
            await follower.look()
            await follower.look()
            current = engine.service.current()
            assert current is not None and str(current) == "run@1"
            assert current.digest != engine.manifest.version.digest
            save_model(other, final)
            os.utime(final / "config.json", ns=(1 << 62, 1 << 62))
            with caplog.at_level(logging.ERROR):
                await follower.look()
            assert "another model" in caplog.text and str(engine.service.current()) == "run@1"

    asyncio.run(follow())
