"""A server loads weights that a run saves while it serves."""

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
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = write_checkpoint(tmp_path / "served")
    latest, final = (tmp_path / "run" / "checkpoints" / name for name in ("latest", "final"))
    num_rows = qwen_tokenizer().vocab_size
    learned = build_model(small_config(max_positions=600), num_rows)
    learned.initialise(1)
    other = build_model(small_config(max_positions=700), num_rows)
    other.initialise(2)

    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    async def looked(follower: WeightFollower) -> str:
        """What is served once the follower has looked twice."""
        await follower.poll()
        await follower.poll()
        return str(follower.engine.service.current())

    async def follow() -> None:
        opened = open_checkpoint(served, None, ("auto", "auto"), 64, 64)
        choice = EngineChoice(2, 1 << 22, "eager", 0)
        async with running_engine(opened, PolicyVersion("run", 0), choice) as engine:
            follower = WeightFollower(engine, tmp_path / "run", engine.manifest.version, served)
            assert await looked(follower) == "run@0"
            latest.parent.mkdir(parents=True)
            save_checkpoint(latest, learned, {"lineage": "taught", "step": 7})
            await follower.poll()
            assert str(engine.service.current()) == "run@0", "it may still be written"
            monkeypatch.setattr(engine.service, "stage", fail)
            with caplog.at_level(logging.ERROR):
                await follower.poll()
            assert "no such luck" in caplog.text and str(engine.service.current()) == "run@0"
            monkeypatch.undo()
            assert await looked(follower) == "taught@7", "what fails is tried again"
            current = engine.service.current()
            assert current is not None and current.digest != engine.manifest.version.digest

            save_model(learned, final)
            assert await looked(follower) == "taught@8"
            tensors = next(final.glob("*.safetensors"))
            os.utime(tensors, ns=(1 << 61, 1 << 61))
            assert await looked(follower) == "taught@9", "the tensors are written after the configuration"

            save_model(other, final)
            os.utime(final / "config.json", ns=(1 << 62, 1 << 62))
            caplog.clear()
            with caplog.at_level(logging.ERROR):
                assert await looked(follower) == "taught@9"
                await follower.poll()
            assert caplog.text.count("another model") == 1, "it is reported once"

            save_model(learned, final)
            for loaded, newest in ((final, "run@0"), (served, "run@1"), (None, "run@1")):
                begun = WeightFollower(engine, tmp_path / "run", PolicyVersion("run", 0), loaded)
                await looked(begun)
                assert str(begun.version) == newest, loaded

    asyncio.run(follow())
