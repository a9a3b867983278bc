"""Checkpoints as files: shards, types, 8-bit floats; every damage is refused with the field and the fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.errors import CheckpointError
from etude.model import LanguageModel
from etude.model.huggingface import from_huggingface, load_model, save_model, to_huggingface
from etude.model.huggingface.fields import read_fields
from etude.model.loading import load_any_model, read_architecture
from etude.model.transformers_model import TransformersModel
from tests.model.reference import our_logits, reference_checkpoint, their_logits_and_routes, tokens_of

INDEX = "model.safetensors.index.json"


def _saved(directory: Path, variant: str = "latent", **options: Any) -> LanguageModel:
    reference_checkpoint(directory / "reference", variant)
    model = load_model(directory / "reference")
    save_model(model, directory / "model", **options)
    return model


def _assert_same(a: LanguageModel, b: LanguageModel) -> None:
    for (name, ours), (_, theirs) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def _refused(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_model(directory)
    assert caught.value.field
    return caught.value


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def _edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dense", "moe_tied", "latent"])
@pytest.mark.parametrize("max_file_bytes", [1, 5_000, 10**9])
def test_shards_hold_what_one_file_holds(tmp_path: Path, variant: str, max_file_bytes: int) -> None:
    model = _saved(tmp_path, variant, max_file_bytes=max_file_bytes)
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert (len(files) > 1) == (max_file_bytes < 10**9) == (tmp_path / "model" / INDEX).exists()
    assert max_file_bytes != 5_000 or all(path.stat().st_size < 20_000 for path in files)
    _assert_same(model, load_model(tmp_path / "model"))


@pytest.mark.slow
def test_saving_again_leaves_no_file_of_the_last_time(tmp_path: Path) -> None:
    model = _saved(tmp_path, max_file_bytes=5_000)
    save_model(model, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    _assert_same(model, load_model(tmp_path / "model"))


def test_a_sharded_checkpoint_of_transformers_is_read(tmp_path: Path) -> None:
    theirs = reference_checkpoint(tmp_path / "one", "latent_yarn")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    _assert_same(load_model(tmp_path / "one"), load_model(tmp_path / "many"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["dense", "moe", "latent"])
def test_every_float_type_is_read_as_it_is(tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    reference_checkpoint(tmp_path / "a", variant).to(dtype).save_pretrained(tmp_path / "b")
    model = load_model(tmp_path / "b")
    assert model.embedding.dtype == torch.float32
    assert torch.equal(model.embedding, model.embedding.to(dtype).float())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    expected, _ = their_logits_and_routes(theirs, tokens_of(20))
    torch.testing.assert_close(our_logits(model, tokens_of(20)), expected, rtol=1e-4, atol=2e-4)


def test_older_names_of_config_fields_are_understood(tmp_path: Path) -> None:
    reference_checkpoint(tmp_path, "latent_mscale")
    model = load_model(tmp_path)

    def old(values: dict[str, Any]) -> None:
        rope = values.pop("rope_parameters")
        values["rope_theta"] = rope.pop("rope_theta")
        values["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
        values["model_type"] = "kimi_k2"
        values |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

    _edit(tmp_path / "config.json", old)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert model.config.yarn_mscale == 0.7


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    model = _saved(tmp_path)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(32, 64)
        tensors["model.layers.3.input_layernorm.weight"] = torch.ones(32)

    _edit_tensors(tmp_path / "model", add)
    assert "extra" in _refused(tmp_path / "model").message
    _edit(tmp_path / "model" / "config.json", lambda values: values.update(num_nextn_predict_layers=1))
    _assert_same(model, load_model(tmp_path / "model"))


def _quantise(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """weight [n, m] in 8-bit floats and the scales by which it is to be multiplied, one per block."""
    rows, columns = -(-weight.shape[0] // block), -(-weight.shape[1] // block)
    scales = torch.empty(rows, columns)
    quantised = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            place = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = weight[place].abs().max() / 448
            quantised[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
    return quantised, scales


def test_eight_bit_weights_are_multiplied_by_their_blocks_scales(tmp_path: Path) -> None:
    model = _saved(tmp_path)
    block, expected = 20, {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            exact = tensors[name]
            tensors[name], tensors[name + "_scale_inv"] = _quantise(exact, block)
            expected[name] = exact

    _edit_tensors(tmp_path / "model", quantise)
    assert _refused(tmp_path / "model").received == "torch.float8_e4m3fn"
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    _edit(tmp_path / "model" / "config.json", lambda v: v.update(quantization_config=quantisation))
    loaded = to_huggingface(load_model(tmp_path / "model"))
    assert len(expected) > 20
    for name, exact in expected.items():
        assert (loaded[name] - exact).abs().max() <= exact.abs().max() / 16
    assert torch.equal(loaded["model.norm.weight"], model.final_norm)
    _edit_tensors(tmp_path / "model", lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(1)}))
    assert _refused(tmp_path / "model").received == ["lm_head.weight_scale_inv"]


def test_scales_that_do_not_fit_or_are_missing_are_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight"
    quantisation = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    _edit(tmp_path / "model" / "config.json", lambda v: v.update(quantization_config=quantisation))
    _edit_tensors(tmp_path / "model", lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    assert _refused(tmp_path / "model").field == name + "_scale_inv"
    _edit_tensors(tmp_path / "model", lambda t: t.update({name + "_scale_inv": torch.ones(2, 3)}))
    error = _refused(tmp_path / "model")
    assert (error.field, error.received) == (name + "_scale_inv", (2, 3))


@pytest.mark.parametrize("variant", ["dense", "moe", "latent"])
@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "nan", "infinity"])
def test_a_wrong_tensor_leaves_the_model_as_it_was(tmp_path: Path, variant: str, damage: str) -> None:
    model = _saved(tmp_path, variant)
    before = to_huggingface(model)
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    name = "model.layers.2.input_layernorm.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors["model.layers.9.surplus"] = torch.ones(1)
    elif damage == "shape":
        tensors[name] = tensors[name][:-1]
    else:
        tensors[name][3] = float("nan") if damage == "nan" else -float("inf")
    with pytest.raises(CheckpointError) as caught:
        from_huggingface(model, tensors)
    assert caught.value.field == ("tensors" if damage in ("missing", "extra") else name)
    assert caught.value.received and caught.value.fix
    for key, tensor in to_huggingface(model).items():
        assert torch.equal(tensor, before[key])


@pytest.mark.parametrize("damage", ["file", "truncated", "header", "index", "elsewhere", "moved", "outside"])
def test_a_damaged_shard_or_index_is_refused(tmp_path: Path, damage: str) -> None:
    _saved(tmp_path, max_file_bytes=20_000)
    directory = tmp_path / "model"
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    index = directory / INDEX
    if damage == "file":
        first.unlink()
    elif damage == "truncated":
        first.write_bytes(first.read_bytes()[:-50])
    elif damage == "header":
        first.write_bytes(b"\xff" * 8 + first.read_bytes()[8:])
    elif damage == "index":
        index.write_text("{")
    elif damage == "elsewhere":
        _edit(index, lambda v: v["weight_map"].update({"model.norm.weight": "absent.safetensors"}))
    elif damage == "moved":
        name = next(iter(load_file(first)))
        _edit(index, lambda v: v["weight_map"].update({name: second.name}))
    else:
        _edit(index, lambda v: v["weight_map"].update({"model.norm.weight": "../model.safetensors"}))
    error = _refused(directory)
    assert error.fix or damage == "outside"


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert _refused(tmp_path / "model").field == "model.safetensors"
    assert _refused(tmp_path / "nowhere").field == "config.json"


def test_a_type_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    _edit_tensors(tmp_path / "model", lambda t: t.update({"model.norm.weight": t["model.norm.weight"].int()}))
    error = _refused(tmp_path / "model")
    assert (error.field, error.received) == ("model.norm.weight", "torch.int32")


def test_a_head_that_differs_from_the_embedding_to_which_it_is_tied_is_refused(tmp_path: Path) -> None:
    model = _saved(tmp_path, "dense_tied")
    embedding = model.embedding.detach()
    _edit_tensors(tmp_path / "model", lambda t: t.update({"lm_head.weight": embedding.clone()}))
    _assert_same(model, load_model(tmp_path / "model"))
    _edit_tensors(tmp_path / "model", lambda t: t.update({"lm_head.weight": embedding + 1}))
    assert _refused(tmp_path / "model").field == "lm_head.weight"
    _edit(tmp_path / "model" / "config.json", lambda v: v.update(tie_word_embeddings=False))
    assert torch.equal(load_model(tmp_path / "model").head, embedding + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "field", "value"),
    [
        ("dense", "model_type", "gpt_neox"),
        ("dense", "hidden_act", "gelu"),
        ("dense", "attention_bias", True),
        ("dense", "use_sliding_window", True),
        ("dense", "layer_types", ["full_attention", "sliding_attention"]),
        ("dense", "layer_types", 2),
        ("dense", "layer_types", [["full_attention"]]),
        ("dense", "num_nextn_predict_layers", "one"),
        ("dense", "num_nextn_predict_layers", -1),
        ("dense", "quantization_config", "fp8"),
        ("dense", "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, None]}),
        ("dense", "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 0]}),
        ("dense", "hidden_size", "wide"),
        ("dense", "hidden_size", 33),
        ("dense", "num_key_value_heads", 3),
        ("dense", "vocab_size", 0),
        ("dense", "rope_parameters", 7),
        ("dense", "rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}),
        ("dense", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("moe", "num_experts_per_tok", 7),
        ("moe", "mlp_only_layers", [1]),
        ("latent", "scoring_func", "softmax"),
        ("latent", "n_group", 5),
        ("latent", "topk_group", 5),
        ("latent", "num_experts_per_tok", 7),
        ("latent", "kv_lora_rank", 0),
        ("latent", "quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_a_config_that_is_not_computed_here_names_the_field(
    tmp_path: Path, variant: str, field: str, value: object
) -> None:
    _saved(tmp_path, variant)
    _edit(tmp_path / "model" / "config.json", lambda values: values.update({field: value}))
    error = _refused(tmp_path / "model")
    assert error.field is not None and error.field.startswith("config.json")
    named = {"num_key_value_heads", "n_group", "topk_group", "num_experts_per_tok"}
    text = str(error)
    assert field.removesuffix("_parameters") in text or (field in named and str(value) in text)


@pytest.mark.parametrize("field", ["hidden_size", "kv_lora_rank", "n_routed_experts", "vocab_size"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    _saved(tmp_path)
    _edit(tmp_path / "model" / "config.json", lambda values: values.pop(field))
    assert _refused(tmp_path / "model").field == f"config.json: {field}"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_bytes_is_taken_for_a_model_or_ends_in_another_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    directory = tmp_path / "model"
    if not directory.exists():
        _saved(tmp_path, "dense_tied", max_file_bytes=10_000)
        (tmp_path / "pristine").mkdir()
        for path in directory.iterdir():
            (tmp_path / "pristine" / path.name).write_bytes(path.read_bytes())
    names = sorted(path.name for path in (tmp_path / "pristine").iterdir())
    name = data.draw(st.sampled_from(names))
    for path in (tmp_path / "pristine").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    content = (directory / name).read_bytes()
    kept = data.draw(st.integers(0, len(content) - 2))
    (directory / name).write_bytes(content[:kept])
    _refused(directory)


def test_what_older_llamas_leave_out_is_what_transformers_takes(tmp_path: Path) -> None:
    from transformers import AutoConfig

    reference_checkpoint(tmp_path, "llama", head_dim=8, num_key_value_heads=8)
    expected = load_model(tmp_path).config

    def old(values: dict[str, Any]) -> None:
        for name in ("head_dim", "num_key_value_heads", "rope_parameters", "max_position_embeddings"):
            del values[name]
        values["num_attention_heads"] = 4

    _edit(tmp_path / "config.json", old)
    theirs = AutoConfig.from_pretrained(tmp_path)
    config = read_fields(tmp_path / "config.json").config
    assert (config.head_dim, config.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads) == (8, 4)
    assert config.rope_theta == theirs.rope_parameters["rope_theta"] == expected.rope_theta
    assert config.max_positions == theirs.max_position_embeddings


@pytest.mark.parametrize("window", [64, "absent", 128, None])
def test_a_window_that_is_shorter_than_the_longest_sequence_is_refused(tmp_path: Path, window: Any) -> None:
    longest = 8192 if window in ("absent", None) else 128
    reference_checkpoint(tmp_path, "mistral", max_position_embeddings=longest)

    def set_window(values: dict[str, Any]) -> None:
        if window == "absent":
            del values["sliding_window"]
        else:
            values["sliding_window"] = window

    _edit(tmp_path / "config.json", set_window)
    if window in (128, None):
        assert read_fields(tmp_path / "config.json").config.architecture == "llama"
        return
    error = _refused(tmp_path)
    assert error.field == "config.json: sliding_window" and error.received in (64, 4096)
    assert "max_position_embeddings" in str(error.fix)


def test_what_is_not_computed_here_goes_through_transformers(tmp_path: Path) -> None:
    reference_checkpoint(tmp_path, "llama", attention_bias=True)
    assert "vllm" in str(_refused(tmp_path).fix)
    assert read_architecture(tmp_path) is None
    assert isinstance(load_any_model(tmp_path), TransformersModel)


@pytest.mark.parametrize("name", ["low_freq_factor", "high_freq_factor", "factor"])
def test_a_field_that_stretches_positions_is_named_where_it_is_missing(tmp_path: Path, name: str) -> None:
    reference_checkpoint(tmp_path, "llama_scaled")
    _edit(tmp_path / "config.json", lambda values: values["rope_parameters"].pop(name))
    assert (_refused(tmp_path).field or "").endswith(name)


@pytest.mark.parametrize(
    ("file", "words"), [("model.safetensors", "git lfs pull"), ("pytorch_model-1.bin", "save_pretrained")]
)
def test_weights_that_lie_elsewhere_or_are_pickled_are_said_to_be(
    tmp_path: Path, file: str, words: str
) -> None:
    _saved(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    error = _refused(tmp_path / "model")
    assert error.field == "model.safetensors" and words in str(error.fix)
