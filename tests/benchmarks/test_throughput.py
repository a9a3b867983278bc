"""The baseline computes and counts as the engine does, and the result has the expected figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from baseline import Baseline, Session, Work
from common import Roofline, median_ratio, token_cost, write_result
from throughput import Measurements, summarise

from etude.config import ModelConfig
from etude.inference import Engine
from etude.model import LanguageModel
from etude.model.huggingface import save_model, to_huggingface
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion, SampleRequest, SamplingParams

CONFIG = ModelConfig(
    hidden_size=32, num_layers=2, head_dim=8, num_experts=4, expert_size=16, max_positions=96
)
VOCABULARY = 64
BLOCK = [
    *(f"{name}_tokens_per_s" for name in ("decode", "prefill", "training", "engine")),
    *("decode_tokens", "engine_steps", "engine_s", "waiting_for_tools_s"),
    *("rollout_s", "train_s", "publish_s", "wall_s"),
]


@pytest.fixture
def model() -> LanguageModel:
    model = LanguageModel(CONFIG, VOCABULARY)
    model.initialise(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # sharper distributions: errors show
    return model


@pytest.fixture
def baseline(model: LanguageModel, tmp_path: Path) -> Baseline:
    save_model(model, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    return Baseline(described, to_huggingface(model))


def random_sequences(lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]


def test_padded_scores_of_the_baseline_are_ours(model: LanguageModel, baseline: Baseline) -> None:
    sequences = random_sequences([40, 7, 23])
    ours = score_sequences(model, sequences)
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(s).long() for s in sequences], batch_first=True
    )
    theirs = baseline.score(tokens).detach().numpy()
    for row, expected in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(row[: len(expected) - 1], expected[1:], atol=1e-4)
    assert min(float(expected[1:].min()) for expected in ours) < -5, "a flat model would show nothing"


def test_replayed_sessions_have_our_logprobs(model: LanguageModel, baseline: Baseline) -> None:
    sequences = random_sequences([60, 31, 45])
    sessions = [
        Session(torch.from_numpy(s).long(), [(10 + i, 14 + i), (25, len(s))]) for i, s in enumerate(sequences)
    ]
    baseline.replay(sessions, 3, Work(), Work())
    for session, expected in zip(sessions, score_sequences(model, sequences), strict=True):
        for first, end in session.messages:
            np.testing.assert_allclose(session.logprobs[first:end], expected[first:end], atol=1e-4)


def test_replay_counts_tokens_as_the_engine_does(model: LanguageModel, baseline: Baseline) -> None:
    engine = Engine(CONFIG, VOCABULARY, 4, 90)
    version = PolicyVersion("run", 0)
    engine.stage(version, dict(model.named_parameters()))
    engine.activate(version)
    prompt = random_sequences([12])[0]
    engine.submit(SampleRequest("a", "s", prompt, SamplingParams(max_tokens=6), frozenset(), (0,)))
    tokens = list(prompt)
    while engine.has_work:
        for finished in engine.step():
            tokens += [int(token) for chunk in finished.chunks for token in chunk.tokens]
    prefill, decode = Work(), Work()
    session = Session(torch.tensor(tokens), [(len(prompt), len(tokens))])
    baseline.replay([session], 6, prefill, decode)
    assert (prefill.tokens, decode.tokens) == (
        engine.counters.prefill_tokens,
        engine.counters.decode_tokens,
    )


def test_a_training_step_of_the_baseline_raises_what_was_rewarded(baseline: Baseline) -> None:
    tokens = torch.from_numpy(random_sequences([20])[0]).long()
    before = baseline.score(tokens[None]).detach()[0]
    sequence = {
        "tokens": tokens,
        "sampled": torch.ones(20, dtype=torch.bool),
        "logprobs": torch.cat((torch.zeros(1), before)),
        "advantages": torch.ones(20),
    }
    baseline.train_step([[sequence]])
    assert baseline.score(tokens[None]).sum() > before.sum()


def test_result_has_figures_peers_machine_versions_and_commit(tmp_path: Path) -> None:
    block = dict.fromkeys(BLOCK, 2.0)
    half = dict.fromkeys(block, 1.0)
    context = {"decode": 10.0, "prefill": 10.0, "training": 10.0, "logits_share": 0.5}
    done = Measurements([block, block], [half, half], [context, context], [torch.zeros(3)])
    figures = summarise(done, Roofline(100.0, 80.0, 20.0), CONFIG, VOCABULARY)
    write_result(tmp_path / "result.json", figures, {"baseline": half})
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert set(result) == {"figures", "peers", "machine", "versions", "commit"}
    assert result["figures"]["decode_vs_baseline"] == 2.0
    for name in ("decode", "prefill", "training"):
        assert 0 < result["figures"][f"{name}_roofline_share"] < 1
    parts = [value for name, value in figures.items() if name.startswith("budget_")]
    assert sum(parts) == pytest.approx(2 * figures["budget_step_s"])


def test_ratios_are_taken_pair_by_pair() -> None:
    assert median_ratio([30.0, 3.0, 4.0], [10.0, 1.0, 1.0]) == 3.0


def test_token_cost_counts_the_products_of_the_model(model: LanguageModel) -> None:
    cost = token_cost(CONFIG, VOCABULARY, context=0.0)
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim >= 2}
    active = sum(n * (0.5 if name.endswith(("gate_up", "down")) else 1.0) for name, n in matrices.items())
    assert CONFIG.experts_per_token / CONFIG.num_experts == 0.5
    assert cost.forward_flops == 2 * active
    assert cost.weight_bytes == 4 * sum(matrices.values())
