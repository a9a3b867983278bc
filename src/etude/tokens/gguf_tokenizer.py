"""Converts the tokenizer of a GGUF file to the files of a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from etude.errors import ConfigError
from etude.tokens.definition import SPACE
from etude.tokens.tokenizer import CONFIG_FILE, GENERATION_FILE, TEMPLATE_FILE, TOKENIZER_FILE

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Types of tokens; tokens of other types have no text."""
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS = {"llama-bpe": _PIECES % r"\p{N}{1,3}", "qwen2": _PIECES % r"\p{N}"}
"""Patterns of pre-tokenisation, by `tokenizer.ggml.pre`: the models' own."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
"""Those that pre-tokenise as GPT-2 does, with each digit by itself."""
_PLAIN = ("gpt-2",)
_LEARNED = {"gpt2": "merges", "llama": "scores"}
"""What a tokenizer learned besides its tokens, by `tokenizer.ggml.model`."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text: the tokenizer, its chat template if there is one, and the tokens that end an answer.

    Raises ConfigError for a tokenizer that is neither byte-level BPE nor SentencePiece's, or with an unknown
    pre-tokenisation.
    """
    given = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    kind = str(given.get("model"))
    if not given.keys() >= {"tokens", _LEARNED.get(kind, "")}:
        raise ConfigError(
            "this kind of tokenizer is not supported, or its data is missing",
            field="tokenizer.ggml.model",
            received=kind,
            fix="; or ".join(f"use {name} with tokenizer.ggml.{data}" for name, data in _LEARNED.items()),
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
    begins = names.get("bos") if given.get("add_bos_token", kind == "llama") else None
    built = _build_byte_level(given) if kind == "gpt2" else _build_sentencepiece(given)
    _add_marks(built, given, begins)
    files = {
        TOKENIZER_FILE: built.to_str(),
        CONFIG_FILE: json.dumps(config, ensure_ascii=False, indent=2) + "\n",
        GENERATION_FILE: json.dumps(generation, indent=2) + "\n",
    }
    if template := metadata.get("tokenizer.chat_template"):
        files[TEMPLATE_FILE] = template
    return files


def _kinds(given: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Each token with its type."""
    return list(
        zip(given["tokens"], given.get("token_type") or [_NORMAL] * len(given["tokens"]), strict=True)
    )


def _build_sentencepiece(given: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece first merges the neighbours whose piece has the best score: as a list of merges, those of
    the best piece come first. llama.cpp puts a space before text at the start and after control tokens."""
    ids = {token: index for index, token in enumerate(given["tokens"])}
    scores = {
        token: score
        for (token, kind), score in zip(_kinds(given), given["scores"], strict=True)
        if kind == _NORMAL
    }
    pairs = [
        (token[:cut], token[cut:])
        for token in scores
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    pairs.sort(key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0]), ids[pair[0]], ids[pair[1]]))
    built = tokenizers.Tokenizer(models.BPE(ids, pairs, fuse_unk=True, byte_fallback=True))
    marks_spaces: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    decoded: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if given.get("add_space_prefix", True):
        marks_spaces = normalizers.Sequence([normalizers.Prepend(SPACE), marks_spaces])
        decoded.append(decoders.Strip(" ", 1, 0))
    built.normalizer, built.decoder = marks_spaces, decoders.Sequence(decoded)
    return built


def _build_byte_level(given: Mapping[str, Any]) -> tokenizers.Tokenizer:
    texts = (_NORMAL, _CONTROL, _USER_DEFINED)
    written = {token: index for index, (token, kind) in enumerate(_kinds(given)) if kind in texts}
    merges = [tuple(pair.split(" ")) for pair in given["merges"]]
    cut = str(given.get("pre"))
    built = tokenizers.Tokenizer(models.BPE(written, merges, ignore_merges=cut == "llama-bpe"))
    built.pre_tokenizer = _pre_tokenizer(cut)
    built.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        built.normalizer = normalizers.NFC()
    return built


def _add_marks(built: tokenizers.Tokenizer, given: Mapping[str, Any], begins: str | None) -> None:
    """Adds the control tokens. `begins`: the token with which an encoded text begins, if any."""
    marked = [(token, kind) for token, kind in _kinds(given) if kind in (_CONTROL, _USER_DEFINED)]
    marked = [(token, kind) for token, kind in marked if built.token_to_id(token) is not None]
    built.add_tokens([AddedToken(t, special=kind != _USER_DEFINED, normalized=False) for t, kind in marked])
    if begins is not None:
        marks = [(begins, given["tokens"].index(begins))]
        built.post_processor = processors.TemplateProcessing(
            f"{begins} $A", f"{begins} $A {begins} $B", marks
        )


def _pre_tokenizer(cut: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of this name. Raises ConfigError for an unknown one."""
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
        "is an unknown pre-tokenizer",
        field="tokenizer.ggml.pre",
        received=cut,
        fix=f"use the model's Hugging Face directory, or one of {known}",
    )
