"""The tokenizer of a GGUF file, as the files that a Hugging Face directory has of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from etude.errors import ConfigError
from etude.tokens.tokenizer import CONFIG_FILE, TOKENIZER_FILE

TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Types of tokens; others stand for no text that can be written."""
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS = {"llama-bpe": _PIECES % r"\p{N}{1,3}", "qwen2": _PIECES % r"\p{N}"}
"""How text is cut before merging, by `tokenizer.ggml.pre`: the models' own patterns."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
"""Those that cut as GPT-2 does, and each digit by itself."""
_PLAIN = ("gpt-2",)


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text: the tokenizer, its chat template if there is one, and which tokens end an answer.

    Raises ConfigError for a tokenizer that is not byte-level, or that cuts text in a way not known here.
    """
    given = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    if given.get("model") != "gpt2" or "tokens" not in given or "merges" not in given:
        raise ConfigError(
            "only byte-level BPE tokenizers are lossless",
            field="tokenizer.ggml.model",
            received=given.get("model"),
            fix="use a model whose tokenizer is byte-level, such as Llama 3, Qwen or SmolLM2",
        )
    names = {
        kind: given["tokens"][given[f"{field}_token_id"]]
        for kind, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{field}_token_id" in given
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{kind}_token": name for kind, name in names.items()}
    ends = {given[name] for name in ("eos_token_id", "eot_token_id") if name in given}
    generation = {
        "bos_token_id": given.get("bos_token_id"),
        "eos_token_id": sorted(ends) if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": given.get("padding_token_id"),
    }
    generation = {name: value for name, value in generation.items() if value is not None}
    begins = names.get("bos") if given.get("add_bos_token") else None
    files = {
        TOKENIZER_FILE: _build(given, begins).to_str(),
        CONFIG_FILE: json.dumps(config, ensure_ascii=False, indent=2) + "\n",
        GENERATION_FILE: json.dumps(generation, indent=2) + "\n",
    }
    if template := metadata.get("tokenizer.chat_template"):
        files[TEMPLATE_FILE] = template
    return files


def _build(given: Mapping[str, Any], begins: str | None) -> tokenizers.Tokenizer:
    """`begins`: the token with which an encoded text begins, if any."""
    tokens, kinds = given["tokens"], given.get("token_type") or [_NORMAL] * len(given["tokens"])
    written = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if _is_text(kind)}
    merges = [tuple(pair.split(" ")) for pair in given["merges"]]
    cut = str(given.get("pre"))
    built = tokenizers.Tokenizer(models.BPE(written, merges, ignore_merges=cut == "llama-bpe"))
    built.pre_tokenizer = _pre_tokenizer(cut)
    built.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        built.normalizer = normalizers.NFC()
    marked = [(t, kind) for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    built.add_tokens([AddedToken(t, special=kind == _CONTROL, normalized=False) for t, kind in marked])
    if begins is not None:
        marks = [(begins, written[begins])]
        built.post_processor = processors.TemplateProcessing(
            f"{begins} $A", f"{begins} $A {begins} $B", marks
        )
    return built


def _is_text(kind: int) -> bool:
    return kind in (_NORMAL, _CONTROL, _USER_DEFINED)


def _pre_tokenizer(cut: str) -> pre_tokenizers.PreTokenizer:
    """What cuts text before merging. Raises ConfigError for a name that is not known here."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if cut in _PLAIN:
        return gpt2
    if cut in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if cut in _PATTERNS:
        split = pre_tokenizers.Split(Regex(_PATTERNS[cut]), "isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    known = ", ".join([*_PLAIN, *_SINGLE_DIGITS, *_PATTERNS])
    raise ConfigError(
        "cuts text in a way that is not known here",
        field="tokenizer.ggml.pre",
        received=cut,
        fix=f"use the model's Hugging Face directory; known are {known}",
    )
