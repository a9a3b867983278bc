"""Opens sources of pre-training: their files, a tokenizer, tokens, and held-out documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from etude.agent.prompts import own_control_tokens
from etude.config import AgentConfig, PretrainConfig, RunConfig, SourceConfig
from etude.errors import ConfigError
from etude.observe import Observer
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer
from etude.tokens.training import END_TOKEN, train_tokenizer
from etude.training import Document
from etude.training.pretraining.corpora import Corpus, open_corpus
from etude.training.pretraining.infilling import OWN_SENTINELS, RESERVED_TOKENS, Infilling
from etude.training.pretraining.reading import SourceFiles, find_files
from etude.training.pretraining.sources import CorpusSource, InfillingShares, cut

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", END_TOKEN)
"""Names of the end-of-document token in known tokenizers."""
TOKENIZER_CHARACTERS = 20_000_000
"""Characters that a tokenizer is trained on, of all sources together."""


def session_control_tokens(agent: AgentConfig | None = None) -> list[str]:
    """Control tokens of a tokenizer trained here: framing, the tools' tags, and fill-in-the-middle."""
    return [*own_control_tokens(agent), *OWN_SENTINELS]


def find_sources(sources: Mapping[str, SourceConfig]) -> list[SourceFiles]:
    """The files of every source. Raises ConfigError where there are no sources, or one has no files."""
    if not sources:
        raise ConfigError(
            "is empty", field="pretrain.sources", fix="give --data NAME=PATH, or [pretrain.sources.NAME]"
        )
    return [find_files(name, source) for name, source in sources.items()]


def train_source_tokenizer(
    files: Sequence[SourceFiles], vocab_size: int, agent: AgentConfig | None = None
) -> Tokenizer:
    """Trains a tokenizer on texts of these sources, equally many characters from each, with control tokens
    for sessions with the tools of `agent`. Raises ConfigError where there are no texts."""
    each = TOKENIZER_CHARACTERS // len(files)
    controls = session_control_tokens(agent)
    texts = (text for source in files for text in _texts(source, each))
    tokenizer = train_tokenizer(texts, vocab_size, controls)
    if tokenizer.vocab_size <= 256 + len(controls):
        raise ConfigError(
            "the sources hold no text to train a tokenizer on",
            field="pretrain.sources",
            received=", ".join(source.name for source in files),
            fix="add sources with text, or set pretrain.tokenizer",
        )
    return tokenizer


def _texts(source: SourceFiles, most_characters: int) -> Iterator[str]:
    remaining = most_characters
    for raw in source.read(Counter()):
        if isinstance(raw, str):
            yield raw.encode("utf-8", "replace").decode()
            remaining -= len(raw)
        if remaining <= 0:
            return


def open_tokenizer(
    config: RunConfig, own: Path, files: Sequence[SourceFiles], observer: Observer
) -> Tokenizer:
    """The tokenizer of a pre-training run: configured, the checkpoint's, or trained once into `own`."""
    if config.pretrain.tokenizer:
        return Tokenizer.load(Path(config.pretrain.tokenizer))
    if config.initial_checkpoint is not None:
        return Tokenizer.load(Path(config.initial_checkpoint))
    if not (own / TOKENIZER_FILE).exists():
        observer.say("training a tokenizer")
        train_source_tokenizer(files, config.tokenizer.vocab_size, config.agent).save(own)
    return Tokenizer.load(own)


def end_token_of(tokenizer: Tokenizer) -> int | None:
    """The end-of-document token; None where the tokenizer has no known one."""
    names = (name for name in _END_TOKENS if tokenizer.has_control(name))
    return next((tokenizer.control_id(name) for name in names), None)


def open_sources(
    files: Sequence[SourceFiles], tokenizer: Tokenizer, config: PretrainConfig, observer: Observer
) -> list[CorpusSource]:
    """The sources as tokens, tokenised now unless they are in the cache. Raises ConfigError."""
    shares = None
    if config.fim_rate:
        shares = InfillingShares(Infilling.of(tokenizer), config.fim_rate, config.fim_spm_share)
    end_token = end_token_of(tokenizer)
    opened: list[CorpusSource] = []
    for source in files:
        corpus = open_corpus(source, tokenizer, end_token, Path(config.cache))
        skipped = "".join(f", {count} skipped: {reason}" for reason, count in corpus.skipped.items())
        observer.say(f"{source.name}: {len(corpus):,} documents, {len(corpus.tokens):,} tokens{skipped}")
        settings = config.sources[source.name]
        heldout = corpus.heldout(settings.heldout_share)
        opened.append(CorpusSource(corpus, settings, heldout, end_token, shares))
    return opened


def heldout_documents(source: CorpusSource, window: int, most_tokens: int) -> list[Document]:
    """Held-out pieces of one source in a fixed random order, at least one, up to `most_tokens`. All their
    tokens are marked."""
    pieces = cut(np.flatnonzero(source.heldout & (source.lengths > 1)), source.lengths, window)
    order = np.random.default_rng(0).permutation(len(pieces))
    found: list[Document] = []
    remaining = most_tokens
    for document, begin, end in pieces[order].tolist():
        if found and end - begin > remaining:
            continue
        remaining -= end - begin
        tokens = source.corpus.document(document)[begin:end]
        found.append(Document(tokens, np.ones(len(tokens), np.float32), np.ones(len(tokens), np.bool_)))
    return found


def heldout_middles(
    corpus: Corpus, documents: Sequence[Document], tokenizer: Tokenizer, window: int
) -> list[Document]:
    """The same texts, slightly shortened, as fill-in-the-middle (prefix, suffix, middle); only the middle's
    tokens are marked. Empty where the tokenizer or the corpus does not support it."""
    infilling = Infilling.find(tokenizer)
    if infilling is None or not corpus.is_text:
        return []
    end_token, random = end_token_of(tokenizer), np.random.default_rng(0)
    shortened = (document.tokens[: window - RESERVED_TOKENS] for document in documents)
    turned = [infilling.rearrange(tokens, end_token, 0.0, random) for tokens in shortened]
    return [
        Document(tokens, np.ones(len(tokens), np.float32), infilling.middles(tokens))
        for tokens in turned
        if tokens is not None and len(tokens) <= window
    ]
