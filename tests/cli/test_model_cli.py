"""`etude model` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from etude.model.huggingface import load_model
from etude.tokens import Tokenizer
from etude.training.checkpoints import find_flaws
from tests.cli.commands import etude
from tests.model.gguf_builder import gguf_package, small_tokenizer, write_gguf
from tests.model.reference import our_logits, reference_model, tokens_of


def _published(directory: Path, **changes: Any) -> Path:
    """A Llama as it is published."""
    tokenizer = small_tokenizer()
    sizes = {"vocab_size": tokenizer.vocab_size} | changes
    reference_model("llama", **sizes).save_pretrained(directory)
    tokenizer.save(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "generation_config.json").write_text('{"eos_token_id": [3]}')
    return directory


def _fails(*arguments: object) -> str:
    result = etude("model", *map(str, arguments))
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_a_hugging_face_directory_comes_in_whole(tmp_path: Path) -> None:
    source = _published(tmp_path / "theirs")
    result = etude("model", "import", str(source), str(tmp_path / "ours"), "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["architecture"], summary["window"], summary["has_chat_template"]) == ("llama", 128, True)
    assert summary["parameters"] == sum(p.numel() for p in load_model(source).parameters())
    assert summary["control_tokens"] == 2
    assert not find_flaws(tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", local_files_only=True)
    assert theirs.dtype == torch.bfloat16
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text())["eos_token_id"] == [3]
    assert theirs.config.eos_token_id == [3], "not 2, which a Llama's config.json means without one"
    shown = etude("model", "show", str(tmp_path / "ours")).stdout
    assert "llama, " in shown and "128 tokens" in shown


def test_a_gguf_file_becomes_a_directory_that_transformers_loads(tmp_path: Path) -> None:
    gguf_package()
    tokenizer = small_tokenizer()
    theirs = reference_model("biased_tied_yarn", vocab_size=tokenizer.vocab_size, rope_parameters=None)
    write_gguf(tmp_path / "model.gguf", theirs, tokenizer, cut="qwen2")
    result = etude("model", "import", str(tmp_path / "model.gguf"), str(tmp_path / "ours"))
    assert result.exit_code == 0, result.output
    assert "qwen2, " in result.stdout and "computed natively" in result.stdout
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", local_files_only=True)
    tokens = tokens_of(20)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        assert torch.equal(back(tokens[None]).logits[0], expected)
    torch.testing.assert_close(
        our_logits(load_model(tmp_path / "ours"), tokens), expected, rtol=1e-5, atol=2e-5
    )
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours", local_files_only=True)
    text = "def add(left): return 345"
    assert reader(text)["input_ids"] == Tokenizer.load(tmp_path / "ours").encode(text).tolist()
    assert reader.chat_template == "{{ messages }}"
    ends = {"eos_token_id": tokenizer.vocab_size - 1}
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text()) == ends
    assert ends.items() <= json.loads((tmp_path / "ours" / "config.json").read_text()).items()


@pytest.mark.parametrize(
    "mistake", ["exists", "absent", "text", "pointer", "tokenizer", "tokens", "head", "memory"]
)
def test_what_cannot_be_used_is_refused_and_leaves_nothing(tmp_path: Path, mistake: str) -> None:
    source, target = _published(tmp_path / "theirs"), tmp_path / "ours"
    config = source / "config.json"
    if mistake == "exists":
        target.mkdir()
    elif mistake == "absent":
        source = tmp_path / "elsewhere"
    elif mistake == "text":
        gguf_package()
        source = tmp_path / "README.md"
        source.write_text("# A model\n")
    elif mistake == "pointer":
        (source / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    elif mistake == "tokenizer":
        (source / "tokenizer.json").write_text(
            '{"model": {"type": "Unigram"}, "decoder": {"type": "Metaspace"}}'
        )
    elif mistake == "tokens":
        source = _published(tmp_path / "small", vocab_size=100)
    elif mistake == "head":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_attention_heads": 16}))
    else:
        _make_huge(source)
    named = {
        "exists": "target: exists already",
        "absent": "SOURCE: does not exist",
        "text": "is not a GGUF file",
        "pointer": "git lfs pull",
        "tokenizer": "is neither a byte-level BPE",
        "tokens": "vocab_size: the tokenizer has",
        "head": "must have shape",
        "memory": "memory: the weights take 4,398",
    }
    assert named[mistake] in _fails("import", source, target)
    assert not target.exists() or not list(target.iterdir())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_chat_template_that_is_broken_is_shown_as_such(tmp_path: Path) -> None:
    source = _published(tmp_path)
    broken = {
        "{% if %}": "is not a Jinja template",
        "{{ raise_exception('no talk') }}": "fails: no talk",
        "{{ messages[0].x.y }}": "fails: ",
    }
    for template, why in broken.items():
        (source / "chat_template.jinja").write_text(template)
        shown = etude("model", "show", str(source)).stdout
        assert f"chat template {why}" in shown, (template, shown)
    summary = json.loads(etude("model", "show", str(source), "--json").stdout)
    assert summary["has_chat_template"] and summary["chat_template_error"].startswith("fails: ")


def test_a_directory_that_is_not_there_is_refused_without_advice_to_fetch_it_again(tmp_path: Path) -> None:
    result = etude("model", "show", str(tmp_path / "none"))
    assert (result.exit_code, "fetch it again" in result.stderr) == (2, False)
    assert "config.json: is missing" in result.stderr


def test_a_model_of_another_architecture_is_shown_with_what_is_not_defined_here(tmp_path: Path) -> None:
    config = _published(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gemma"}))
    result = etude("model", "show", str(tmp_path))
    assert "(config.json: model_type 'gemma': Étude does not implement this architecture)" in result.stdout


def _make_huge(directory: Path) -> None:
    """Makes the embedding one of four terabytes, in a file that takes no room."""
    config = json.loads((directory / "config.json").read_text())
    rows = 1 << 35
    config |= {"vocab_size": rows, "tie_word_embeddings": True, "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    kept = {
        name: entry
        for name, entry in header.items()
        if name not in ("lm_head.weight", "__metadata__")
        and not name.startswith(("model.layers.1", "model.layers.2"))
    }
    kept["model.embed_tokens.weight"]["shape"][0] = rows
    offset = 0
    for entry in kept.values():
        size = 4
        for edge in entry["shape"]:
            size *= edge
        entry["data_offsets"] = [offset, offset + size]
        offset += size
    text = json.dumps(kept).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def test_gguf_without_its_package_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    result = etude("model", "import", str(tmp_path / "model.gguf"), str(tmp_path / "ours"))
    assert result.exit_code != 0 and "pip install" in result.stderr and "gguf" in result.stderr
