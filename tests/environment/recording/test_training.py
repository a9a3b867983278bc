"""Recorded sessions become a step of training: recorded, rewarded, joined to groups, trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import torch

from etude.config import RunConfig
from etude.controller.recorded import resolve_recorded, train_recorded
from etude.environment.recording import MapLimits, RecordingLimits
from etude.environment.recording.server import build_app
from etude.inference import Engine, EngineService
from etude.model import LanguageModel
from etude.model.huggingface import save_model
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.observer import SilentObserver
from etude.records import PolicyVersion
from etude.store.trajectories import TrajectoryLog
from etude.training import load_checkpoint
from etude.weights import MemoryWeights
from tests.environment.recording.recording_builders import TOKEN, make_recordings, qwen_tokenizer
from tests.environment.recording.test_with_engine import CONFIG, make_model


async def record(model: LanguageModel, store: Path, rewards: tuple[float, ...], group_size: int) -> None:
    """A session for each reward, all of one group, over HTTP and the engine."""
    engine, weights = (
        Engine(CONFIG, qwen_tokenizer().vocab_size, num_sessions=4, max_tokens=300),
        MemoryWeights(),
    )
    async with EngineService(engine, weights.fetch, delay_steps=None) as sampler:
        manifest = weights.publish(PolicyVersion("tiny", 0), dict(model.named_parameters()))
        await sampler.stage(manifest)
        await sampler.activate(manifest.version)
        limits = RecordingLimits(session=MapLimits(max_context_tokens=299))
        recordings = make_recordings(sampler, store, limits=limits)
        transport = httpx.ASGITransport(build_app(recordings))
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers
        ) as client:
            for index, reward in enumerate(rewards):
                spec = {"task": "t", "group": 3, "index": index}
                spec |= {"group_size": group_size} if group_size else {}
                session = (await client.post("/sessions", json=spec)).json()
                body = {"input": "Fix it.", "max_output_tokens": 8}
                answer = await client.post(f"{session['openai_base_url']}/responses", json=body)
                assert answer.json()["usage"]["output_tokens"], answer.text
                told = await client.post(f"/sessions/{session['id']}/finish", json={"reward": reward})
                assert told.status_code == 200, told.text
        await recordings.close()


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [2, 0])
def test_two_recorded_members_of_a_group_give_a_step_with_a_gradient(tmp_path: Path, group_size: int) -> None:
    model = make_model()
    save_model(model, tmp_path / "model")
    qwen_tokenizer().save(tmp_path / "model")
    asyncio.run(record(model, tmp_path / "store", (1.0, 0.0), group_size))
    assert [len(group.members) for group in TrajectoryLog(tmp_path / "store").read()] == [1, 1]
    rl = {
        "groups_per_step": 1,
        "updates_per_step": 1,
        "num_steps": 3,
        "stream": {"source": str(tmp_path / "store")},
    }
    rl["optimizer"] = {"learning_rate": 1e-3, "warmup_steps": 0}
    tree = {"name": "learned", "runs_directory": str(tmp_path), "num_threads": 1, "device": "cpu", "rl": rl}
    config = resolve_recorded(
        RunConfig.model_validate({**tree, "initial_checkpoint": str(tmp_path / "model")})
    )
    run = RunDirectory.create(config)
    report = train_recorded(config, run, SilentObserver(), False)
    assert (report["rl_steps"], report["trained_groups"], report["passed_groups"]) == (1, 1, {})
    (row,) = [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
    assert row["k3"] < 1e-6, "the trainer computes what the engine sampled with"
    learned, _ = load_checkpoint(run.checkpoints / "final")
    before = torch.cat([one.detach().flatten() for one in model.parameters()])
    after = torch.cat([one.detach().flatten() for one in learned.parameters()])
    assert (after - before).abs().max() > 1e-4
