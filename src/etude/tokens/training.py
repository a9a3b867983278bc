"""Trains a small byte-level BPE that spends few tokens on Python code and agent sessions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from etude.errors import ConfigError
from etude.tokens.tokenizer import Tokenizer

SPLIT_PATTERN = "|".join(
    (
        r"[\n\t](?: {4})*",  # a line's start with its indentation, in source and in numbered listings
        r"(?: {4})+",
        r" ?\d",  # one token per digit: numbers are never memorised as words
        r"\p{L}+/",  # a directory of a path
        r"\.py\b",
        r" ?\p{L}+_(?=\p{L})",  # test_ of test_tally: the name itself stays one token everywhere
        r" ?\p{L}+",
        r" ?[^\s\p{L}\d]+",
        r"\s",
    )
)
"""Merges never cross the boundaries of these patterns."""

END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 1024, control_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Learns a vocabulary of at most `vocab_size` tokens, control tokens included, from `texts`.

    Control tokens written out in the texts only separate them, so rendered sessions may be passed.
    Deterministic: equal texts in equal order give an equal digest. The vocabulary ends with the control
    tokens in the given order; it is smaller than asked where the texts offer no more pairs that repeat.

    Raises ConfigError if `vocab_size` has no room for 256 bytes and the control tokens.
    """
    names = list(dict.fromkeys(control_tokens))
    smallest = 256 + len(names)
    if vocab_size < smallest:
        raise ConfigError(
            "too small for all bytes and the control tokens",
            field="tokenizer.vocab_size",
            received=vocab_size,
            fix=f"use at least {smallest}",
        )
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(names),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    learner.train_from_iterator(_plain_parts(texts, names), trainer=trainer)
    learner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return Tokenizer(learner.to_str(), _config(names))


def _plain_parts(texts: Iterable[str], control_tokens: Sequence[str]) -> Iterator[str]:
    if not control_tokens:
        yield from texts
        return
    control = re.compile("|".join(re.escape(name) for name in control_tokens))
    for text in texts:
        yield from (part for part in control.split(text) if part)


def _config(control_tokens: Sequence[str]) -> dict[str, object]:
    roles = {"eos_token": END_TOKEN, "pad_token": PAD_TOKEN}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{role: name for role, name in roles.items() if name in control_tokens},
    }
