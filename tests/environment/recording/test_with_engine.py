"""The recording endpoint over the real engine: recorded log-probabilities equal the trainer's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from etude.config import ModelConfig
from etude.environment.recording import AnswerService, MapLimits, SessionMap
from etude.inference import Engine, EngineService
from etude.kit.locks import locked
from etude.kit.ports import free_port
from etude.model import LanguageModel
from etude.model.huggingface import save_model
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion
from etude.store.trajectories import TrajectoryLog
from etude.weights import MemoryWeights
from tests.cli.commands import etude
from tests.environment.recording.recording_builders import ChatClient, qwen_tokenizer, renderers
from tests.environment.recording.test_session_map import SYSTEM, USER, altered, result

CONFIG = ModelConfig(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, num_experts=4, expert_size=16
)


def make_model() -> LanguageModel:
    model = LanguageModel(CONFIG, qwen_tokenizer().vocab_size)
    model.initialise(0)
    return model


def test_recorded_logprobs_are_those_that_the_trainer_computes() -> None:
    model = make_model()

    async def talk() -> AnswerService:
        engine = Engine(CONFIG, qwen_tokenizer().vocab_size, num_sessions=4, max_tokens=700)
        weights = MemoryWeights()
        async with EngineService(engine, weights.fetch, delay_steps=None) as sampler:
            manifest = weights.publish(PolicyVersion("tiny", 3), dict(model.named_parameters()))
            await sampler.stage(manifest)
            await sampler.activate(manifest.version)
            service = AnswerService(
                SessionMap("t", renderers().find, MapLimits(max_context_tokens=699)), sampler
            )
            client = ChatClient(service)
            history: list[dict[str, Any]] = [SYSTEM, USER]
            for number in range(3):
                message, *outputs = result(await client.send(history, max_tokens=12))
                history += [altered(message, "all"), *outputs, {"role": "user", "content": f"more {number}"}]
            await asyncio.gather(*(client.send(history, max_tokens=8) for _ in range(2)))
            await service.stop()
        return service

    service = asyncio.run(talk())
    segments = service.session_map.segments()
    assert [segment.relation for segment in segments] == ["root", "fork"]
    scored = score_sequences(model, [np.array(segment.tokens) for segment in segments])
    for segment, logprobs in zip(segments, scored, strict=True):
        assert segment.num_sampled_tokens
        # Rounding alone differs, by the order of sums; a token out of place differs by far more.
        np.testing.assert_allclose(
            logprobs[segment.sampled], segment.logprobs[segment.sampled], rtol=0, atol=1e-5
        )
        assert {(span.version.lineage, span.version.step) for span in segment.version_spans} == {("tiny", 3)}
    for branch in service.session_map.branches:
        routes = branch.recording.routes()
        assert routes is not None and (routes[:-1] < CONFIG.num_experts).all()


def save(directory: Path) -> None:
    save_model(make_model(), directory)
    qwen_tokenizer().save(directory)


@pytest.mark.slow
def test_the_command_serves_a_checkpoint_and_stores_what_was_played(tmp_path: Path) -> None:
    save(tmp_path / "model")
    port = free_port()
    command = ["record", "serve", "--model", str(tmp_path / "model"), "--store", str(tmp_path / "store")]
    command += [
        "--port",
        str(port),
        "--kernels",
        "eager",
        "--lineage",
        "tiny",
        "--step",
        "7",
        "--drain-s",
        "5",
    ]
    process = subprocess.Popen([sys.executable, "-c", "from etude.cli import main; main()", *command])
    try:
        end_s = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except httpx.HTTPError:
                assert process.poll() is None and time.monotonic() < end_s, "the server did not start"
                time.sleep(0.2)
        token = (tmp_path / "store" / "tokens").read_text().split()[1]
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
            session = client.post("/sessions", json={"task": "t"}).json()
            body = {"messages": [USER], "max_tokens": 5}
            url = f"{session['openai_base_url']}/chat/completions"
            assert client.post(url, json=body).json()["usage"]["completion_tokens"]
            assert client.post(f"/sessions/{session['id']}/finish", json={"reward": 1}).status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)
    (group,) = TrajectoryLog(tmp_path / "store").read()
    assert group.members[0].oldest_version == PolicyVersion("tiny", 7, group.members[0].oldest_version.digest)


def test_the_command_refuses_what_it_cannot_serve(tmp_path: Path) -> None:
    save(tmp_path / "model")
    base = ["record", "serve", "--model", str(tmp_path / "model"), "--store", str(tmp_path / "store")]
    cases = {
        "--host": "0.0.0.0",
        "--grammar": "yaml",
        "--template": "etude",
        "--max-tokens": "100000",
        "--kernels": "fast",
    }
    for option, value in cases.items():
        answer = etude(*base, option, value)
        assert answer.exit_code == 2 and option.strip("-") in answer.stderr, (option, answer.output)
    assert etude("record", "serve", "--model", str(tmp_path), "--store", str(tmp_path / "s")).exit_code == 2
    assert "Usage" in etude("record", "serve", "--help").stdout


def test_a_second_server_on_one_store_is_refused_before_it_reads_weights(tmp_path: Path) -> None:
    with locked(tmp_path):  # as the first one has it
        answer = etude("record", "serve", "--model", str(tmp_path / "no"), "--store", str(tmp_path))
    assert (
        answer.exit_code == 2 and "--store: another server already stores its sessions here" in answer.stderr
    )
