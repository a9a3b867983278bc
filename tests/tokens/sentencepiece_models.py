"""Small tokenizers as SentencePiece makes them, with chat templates of the kinds that their models have."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import models, normalizers, trainers

from etude.tokens import Tokenizer

SPACE = "▁"
TEXTS = (
    "def tally(xs):\n    total = 1\n    return total",
    "You are a coding agent. Fix lib/tally.py now.\n\n",
)
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPENDS = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, REPLACE]}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}

TURNS = """\
{{- bos_token }}\
{%- set start = 1 if messages[0].role == 'system' else 0 %}{%- for message in messages[start:] %}\
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('alternate') }}{%- endif %}\
{{- '<turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}\
{{- messages[0].content + '\\n\\n' if start and loop.first else '' }}{{- message.content + '<turn_end>\\n' }}\
{%- endfor %}{{- '<turn>model\\n' if add_generation_prompt else '' }}"""
"""As Gemma's: the system's words begin the user's first message."""

INST = """\
{{- bos_token }}{%- set start = 1 if messages[0].role == 'system' else 0 %}\
{%- for message in messages[start:] %}\
{%- if message.role == 'user' %}\
{{- '[INST]' + (messages[0].content + '\\n\\n' if start and loop.last else '') }}\
{{- message.content + '[/INST]' }}\
{%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}\
{%- else %}{{- raise_exception('no such role') }}{%- endif %}{%- endfor %}"""
"""As Mistral's: the system's words begin the user's last message, and only answers end with a token."""

WORDS = """\
{% for message in messages %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
"""As TinyLlama's: words open messages, and nothing stands before the first."""

SWALLOWS = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}\
{% endfor %}{{ '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""
"""As Phi-3's, whose control tokens swallow the blanks behind them."""


@cache
def _learned() -> tuple[dict[str, int], list[list[str]]]:
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", SPACE)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, max_token_length=6)
    learner.train_from_iterator([line for text in TEXTS for line in text.split("\n")] * 4, trainer)
    model = json.loads(learner.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {token: place for place, token in enumerate([*first, *model["vocab"]])}, model["merges"]


def spm_tokenizer(
    template: str = "",
    marks: tuple[str, ...] = (),
    normalizer: dict[str, Any] | None = PREPENDS,
    cutter: dict[str, Any] | None = None,
    rstrip: bool = False,
    words: tuple[str, ...] = (),
) -> Tokenizer:
    """`marks`: control tokens beside those at the ends of texts. `words`: of the vocabulary, added whole."""
    vocabulary, merges = _learned()
    vocabulary = {**vocabulary, **{word: len(vocabulary) + place for place, word in enumerate(words)}}
    flags = {"single_word": False, "lstrip": False, "normalized": False}
    named = [*("<unk>", "<s>", "</s>"), *words, *marks]
    added = [
        {
            "id": vocabulary.get(name, len(vocabulary) + place - 3 - len(words)),
            "content": name,
            **flags,
            "rstrip": rstrip and name in marks,
            "special": name not in words,
        }
        for place, name in enumerate(named)
    ]
    definition = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": normalizer, "pre_tokenizer": cutter, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": vocabulary, "merges": merges},
    }  # fmt: skip
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(json.dumps(definition), {**config, **({"chat_template": template} if template else {})})


def turns_tokenizer() -> Tokenizer:
    return spm_tokenizer(TURNS, ("<turn>", "<turn_end>"), normalizer=REPLACE)


def inst_tokenizer() -> Tokenizer:
    return spm_tokenizer(INST, ("[INST]", "[/INST]"), normalizer=None, cutter=METASPACE)


def words_tokenizer() -> Tokenizer:
    return spm_tokenizer(WORDS)


def swallowing_tokenizer() -> Tokenizer:
    return spm_tokenizer(SWALLOWS, ("<|user|>", "<|system|>", "<|assistant|>", "<|end|>"), rstrip=True)
