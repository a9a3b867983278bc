"""Multi-token prediction drafts: the same tokens in fewer steps, depending on the layers' accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.errors import ConfigError, WeightUpdateError
from etude.inference import Engine, MtpDrafts, NgramLookup, choose_drafts
from etude.inference.cache import PagedCache, StepRows
from etude.inference.engine import Kernels
from etude.inference.native import NativeForward
from etude.model import DRAFT_PREFIX, DraftLayers, LanguageModel, PackedAttention
from etude.model.huggingface import save_model
from etude.model.huggingface.layout import draft_entries
from etude.model.kernels.invariant import InvariantOps, InvariantPackedAttention
from tests.inference.builders import (
    ALL_KERNELS,
    Client,
    drain,
    needs_compiler,
    prompt,
    serve,
    small_engine,
    version,
)
from tests.inference.invariants import check_engine
from tests.model.builders import VOCAB, draft_layers, small_config, small_model

_DENSE = {"architecture": "qwen3", "intermediate_size": 48}
_LATENT = {
    "architecture": "deepseek_v3",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


@torch.no_grad()
def _bigrams() -> tuple[LanguageModel, DraftLayers]:
    """A model whose next token depends on the last one alone, and draft layers that know how."""
    model = small_model(3)
    for name, parameter in model.named_parameters():
        if name.endswith((".out", ".down")):
            parameter.zero_()
    drafts, width = draft_layers(model, 2), model.config.hidden_size
    for name, parameter in drafts.named_parameters():
        if name.endswith((".out", ".down")):
            parameter.zero_()
        elif name.endswith("projection"):
            parameter.copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1))
        elif name.endswith("final_norm"):
            parameter.copy_(model.final_norm)
    return model, drafts


def _sample_all(engine: Engine, temperature: float, num_tokens: int = 40) -> list[Client]:
    """Two messages each of four sessions, of which two share their prompt."""
    clients = [Client(f"s{number}", number) for number in range(4)]
    for turn in range(2):
        for number, client in enumerate(clients):
            suffix = prompt(20 + number // 2, number // 2) if turn == 0 else prompt(5, number)
            client.ask(engine, suffix, max_tokens=num_tokens // (turn + 1), temperature=temperature)
        drain(engine, clients)
        check_engine(engine)
    return clients


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("num_layers", "num_drafts"), [(1, 1), (1, 3), (2, 4)])
def test_tokens_and_routes_are_those_without_drafts(
    kernels: Kernels, temperature: float, num_layers: int, num_drafts: int
) -> None:
    model = small_model(3)
    drafts = MtpDrafts(draft_layers(model, num_layers), num_drafts, adaptive=False)
    plain = _sample_all(small_engine(model, kernels=kernels, num_pages=18), temperature)
    engine = small_engine(model, kernels=kernels, drafts=drafts, prefill_tokens=9, num_pages=18)
    drafted = _sample_all(engine, temperature)
    assert [client.tokens for client in drafted] == [client.tokens for client in plain]
    if kernels == "native":
        assert [client.logprobs for client in drafted] == [client.logprobs for client in plain]
    for client in drafted:
        client.check(model, temperature or 1.0)
    assert engine.counters.drafted_tokens > 100
    assert engine.counters.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_layers_that_know_what_the_model_knows_are_always_right(temperature: float, num_drafts: int) -> None:
    """Sampled tokens too, since a draft is drawn with the noise of the token."""
    model, drafts = _bigrams()
    plain = small_engine(model)
    engine = small_engine(model, drafts=MtpDrafts(drafts, num_drafts, adaptive=False))
    expected, clients = _sample_all(plain, temperature), _sample_all(engine, temperature)
    assert [client.tokens for client in clients] == [client.tokens for client in expected]
    counters = engine.counters
    assert counters.accepted_tokens == counters.drafted_tokens > 0
    assert counters.steps < plain.counters.steps * (0.6 if num_drafts == 1 else 0.4)


@torch.no_grad()
def _reference(model: LanguageModel, drafts: DraftLayers, tokens: NDArray[np.int32], count: int) -> list[int]:
    """The likeliest drafts behind `tokens`, each layer run over the whole sequence."""
    known = torch.from_numpy(tokens.astype(np.int64))
    length, num_layers = len(known), len(drafts.layers)
    hidden = inputs = model(known[:-1], torch.arange(length - 1), PackedAttention([length - 1]))
    for number in range(count):
        layer = min(number, num_layers - 1)
        inputs = hidden if number < num_layers else torch.cat((inputs, hidden[-1:]))
        following, positions = known[layer + 1 : layer + 1 + len(inputs)], torch.arange(len(inputs))
        hidden = drafts(model, layer, inputs, following, positions, PackedAttention([len(inputs)]))
        known = torch.cat((known, model.logits(hidden[-1:]).argmax(-1)))
    return known[length:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "num_drafts", "changes"),
    [(1, 1, {}), (1, 3, {}), (2, 2, {}), (3, 3, {}), (2, 3, _DENSE), (2, 3, _LATENT)],
)
def test_drafts_are_those_of_the_layers_over_the_whole_sequence(
    num_layers: int, num_drafts: int, changes: dict
) -> None:
    """Step by step, whatever was drafted wrongly before."""
    model = small_model(3, **changes)
    drafts = draft_layers(model, num_layers)
    engine = small_engine(model, prefill_tokens=7, drafts=MtpDrafts(drafts, num_drafts, adaptive=False))
    Client("s", 0).ask(engine, prompt(20, 0), max_tokens=12, temperature=0.0)
    sequences, drafter, checked = engine._scheduler.sequences, engine._stepper._drafter, 0
    assert drafter is not None
    while engine.has_work:
        engine.step()
        tokens = sequences.tokens[0, : int(sequences.length[0])]
        proposed = drafter.draft(0, tokens, num_drafts).tolist()
        if engine.has_work and proposed:
            assert proposed == _reference(model, drafts, tokens, len(proposed))
            checked += len(proposed)
    assert checked >= 9 * min(num_drafts, 2)


@needs_compiler
@pytest.mark.parametrize("changes", [{}, _DENSE, _LATENT], ids=["experts", "dense", "latent"])
def test_native_draft_layers_have_the_bits_of_the_module_however_steps_are_cut(changes: dict) -> None:
    model = small_model(3, **changes)
    drafts = draft_layers(model, 2)
    length, generator = 40, torch.Generator().manual_seed(1)
    hidden = torch.randn((length, model.config.hidden_size), generator=generator)
    tokens = np.array(prompt(length, 5), dtype=np.int64)
    table = np.arange(3, dtype=np.int32)[None]

    def run(parts: list[int], layer: int) -> Tensor:
        cache = PagedCache(model.config, 3)
        cache.drafts = PagedCache(drafts.config, 3)
        native, outputs, start = NativeForward(model, cache, drafts=drafts), list[Tensor](), 0
        for count in parts:
            rows = StepRows.plan(tokens[start : start + count], table, np.array([count]), np.array([start]))
            outputs.append(native.draft_layer(layer, rows, hidden[start : start + count]))
            start += count
        return torch.cat(outputs)

    for layer in range(2):
        whole = run([length], layer)
        assert torch.equal(run([1, 1, 17, 20, 1], layer), whole)
        model.ops = InvariantOps()
        attention = InvariantPackedAttention([length])
        with torch.no_grad():
            expected = drafts(model, layer, hidden, torch.from_numpy(tokens), torch.arange(length), attention)
        assert torch.equal(whole, expected)


def test_samples_of_one_prompt_share_its_slots_and_draft_alike() -> None:
    model, drafts = _bigrams()
    engine = small_engine(model, num_sessions=6, drafts=MtpDrafts(drafts, 2, adaptive=False))
    clients = [Client(f"s{number}", number) for number in range(6)]
    for client in clients:
        client.ask(engine, prompt(36, 0), max_tokens=30)
    drain(engine, clients)
    assert engine.counters.cached_tokens > 5 * 30
    assert engine.counters.accepted_tokens == engine.counters.drafted_tokens > 0
    assert len({tuple(client.tokens) for client in clients}) == 6


def test_an_abort_between_draft_and_verification_leaves_nothing_behind() -> None:
    model, drafts = _bigrams()
    engine = small_engine(model, num_sessions=1, drafts=MtpDrafts(drafts, 4, adaptive=False))
    client = Client("s", 0)
    request = client.ask(engine, prompt(20, 0), max_tokens=30)
    for _ in range(3):
        engine.step()
    answer = engine.abort(request.id)
    assert answer is not None
    client.take(answer.chunks[0])
    check_engine(engine)
    client.ask(engine, prompt(4, 1), max_tokens=10)
    drain(engine, [client])
    client.check(model)
    engine.close("s")
    again = Client("again", 1)
    again.ask(engine, prompt(20, 0), max_tokens=30)
    drain(engine, [again])
    again.check(model)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_layers_that_lag_behind_the_weights_change_no_token(kv: str) -> None:
    models, drafts = [small_model(1), small_model(2)], draft_layers(small_model(1), 2)
    tokens: list[list[list[int]]] = []
    for drafted in (None, MtpDrafts(drafts, 3, adaptive=False)):
        engine = small_engine(models[0], drafts=drafted)
        clients = [Client(f"s{number}", number) for number in range(3)]
        for client in clients:
            client.ask(engine, prompt(8, 0), max_tokens=1)
        drain(engine, clients)
        serve(engine, models[1], 1, kv)
        for client in clients:
            client.ask(engine, prompt(8, 1), max_tokens=30)
        drain(engine, clients)
        tokens.append([client.tokens for client in clients])
    assert tokens[0] == tokens[1]


def _snapshot(model: LanguageModel, drafts: DraftLayers) -> dict[str, Tensor]:
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return own | {DRAFT_PREFIX + name: p.detach() for name, p in drafts.named_parameters()}


@pytest.mark.slow
def test_weights_bring_their_draft_layers_along_or_keep_those_in_service() -> None:
    model, knowing = _bigrams()
    engine = small_engine(model, drafts=MtpDrafts(draft_layers(model, 2), 2, adaptive=False))

    def accepted(number: int) -> float:
        before = engine.counters.accepted_tokens, engine.counters.drafted_tokens
        client = Client(f"s{number}", number)
        client.ask(engine, prompt(20, number), max_tokens=40)
        drain(engine, [client])
        drafted = engine.counters.drafted_tokens - before[1]
        return (engine.counters.accepted_tokens - before[0]) / drafted

    assert accepted(0) < 0.5
    engine.stage(version(1), _snapshot(model, knowing))
    assert accepted(1) < 0.5, "staged is not served"
    engine.activate(version(1))
    assert accepted(2) == 1.0
    for step in (2, 3):
        serve(engine, model, step)
        assert accepted(step) == 1.0, "the layers stay in service"


def test_draft_layers_that_do_not_fit_refuse_the_whole_update() -> None:
    model, knowing = _bigrams()
    engine = small_engine(model, drafts=MtpDrafts(draft_layers(model, 2), 2, adaptive=False))
    name = DRAFT_PREFIX + "layers.0.final_norm"
    whole = _snapshot(model, knowing)
    for damaged, field in (
        ({key: value for key, value in whole.items() if key != name}, "tensors"),
        (whole | {name: torch.ones(3)}, "layers.0.final_norm"),
        (whole | {name: whole[name] * float("nan")}, "layers.0.final_norm"),
    ):
        with pytest.raises(WeightUpdateError) as caught:
            engine.stage(version(1), damaged)
        assert caught.value.field == field
        with pytest.raises(WeightUpdateError, match="not staged"):
            engine.activate(version(1))
    small_engine(model).stage(version(1), whole)  # who does not draft leaves them aside


def test_numbers_of_drafts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_drafts"):
        MtpDrafts(draft_layers(small_model()), 0, adaptive=False)


_WORDS = np.random.default_rng(0).integers(0, VOCAB, (16, 4))


def _repetitive(source: np.random.Generator, count: int, length: int) -> Tensor:
    """Sequences [count, length] of random words of four tokens: three in four can be known."""
    words = _WORDS[source.integers(0, len(_WORDS), (count, -(-length // 4)))]
    return torch.from_numpy(words.reshape(count, -1)[:, :length])


def _train(
    model: LanguageModel, drafts: DraftLayers, num_steps: int, count: int = 8, length: int = 48
) -> None:
    """First the model, then its draft layers, by the loss of DeepSeek-V3: the mean of each layer's cross
    entropy, the model's hidden states given."""
    source, depth = np.random.default_rng(1), len(drafts.layers)
    seen = length - depth - 1
    own, theirs = (torch.optim.Adam(module.parameters(), 5e-3) for module in (model, drafts))
    for step in range(2 * num_steps):
        tokens = _repetitive(source, count, length)
        positions = torch.arange(seen).repeat(count)
        attention = PackedAttention([seen] * count)
        hidden = model(tokens[:, :seen].flatten(), positions, attention)
        losses = [F.cross_entropy(model.logits(hidden), tokens[:, 1 : seen + 1].flatten())]
        if step >= num_steps:
            hidden, losses = hidden.detach(), []
            for layer in range(depth):
                following = tokens[:, layer + 1 : layer + 1 + seen].flatten()
                hidden = drafts(model, layer, hidden, following, positions, attention)
                after = tokens[:, layer + 2 : layer + 2 + seen].flatten()
                losses.append(F.cross_entropy(model.logits(hidden), after))
        optimizer = own if step < num_steps else theirs
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 2])
def test_trained_layers_save_steps(num_layers: int) -> None:
    """Where three tokens of four can be known, most drafts are right; random layers are nearly never."""
    torch.manual_seed(0)
    model = small_model(3)
    trained, untrained = draft_layers(model, num_layers), draft_layers(model, num_layers)
    _train(model, trained, 100)
    prompts = _repetitive(np.random.default_rng(2), 4, 20)
    engines = {
        name: small_engine(model, drafts=drafts)
        for name, drafts in (
            ("plain", None),
            ("trained", MtpDrafts(trained, 2, adaptive=False)),
            ("untrained", MtpDrafts(untrained, 2, adaptive=False)),
        )
    }
    tokens: dict[str, list[list[int]]] = {}
    for name, engine in engines.items():
        clients = [Client(f"s{number}", number) for number in range(4)]
        for client, given in zip(clients, prompts.tolist(), strict=True):
            client.ask(engine, given, max_tokens=70)
        drain(engine, clients)
        tokens[name] = [client.tokens for client in clients]
    assert tokens["plain"] == tokens["trained"] == tokens["untrained"]
    share = {
        name: engine.counters.accepted_tokens / max(1, engine.counters.drafted_tokens)
        for name, engine in engines.items()
    }
    steps = {name: engine.counters.steps for name, engine in engines.items()}
    assert share["trained"] > 0.5
    assert share["untrained"] < 0.15
    assert steps["trained"] < 0.65 * steps["plain"]


def test_a_cache_for_draft_layers_has_the_pages_of_the_models() -> None:
    drafts = MtpDrafts(DraftLayers(small_config(), 2))
    cache = Engine(small_config(), VOCAB, 2, 64, drafts=drafts)._cache
    assert cache.drafts is not None
    assert cache.drafts.keys.shape[:2] == (2, cache.num_pages)


def test_layers_are_read_from_a_checkpoint_that_has_them(tmp_path: Path) -> None:
    model = small_model(3, **_LATENT)
    save_model(model, tmp_path)
    assert choose_drafts("mtp", 0, tmp_path) is None
    assert choose_drafts("ngram", 4, None) == NgramLookup(4)
    for checkpoint in (tmp_path, None):
        with pytest.raises(ConfigError) as caught:
            choose_drafts("mtp", 2, checkpoint)
        assert caught.value.field == "engine.drafts"
    drafts = draft_layers(model)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = draft_entries(drafts, model.config.num_layers)
    save_file(
        tensors | {name: entry.read() for name, entry in stored.items()}, tmp_path / "model.safetensors"
    )
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    chosen = choose_drafts("mtp", 2, tmp_path)
    assert isinstance(chosen, MtpDrafts)
    assert chosen.num_drafts == 2
    assert torch.equal(chosen.layers.layers[0].projection, drafts.layers[0].projection)  # type: ignore[arg-type]
