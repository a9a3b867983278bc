"""Continued pre-training: trains a model and its tokenizer on corpora, resumable at any step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.config import RunConfig
from etude.controller.corpora import (
    find_sources,
    heldout_documents,
    heldout_middles,
    open_sources,
    open_tokenizer,
)
from etude.controller.mixtures import Heldout, StageContext, open_model, resolve, run_stage
from etude.controller.stored import RUN_TOKENIZER
from etude.observe import Observer, RunDirectory
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document
from etude.training.pretraining.sources import CorpusSource


def check_pretraining(config: RunConfig) -> None:
    """Raises ConfigError, before a run directory is made, for missing sources and unfit models."""
    find_sources(resolve(config).pretrain.sources)


def pretrain(config: RunConfig, run: RunDirectory, observer: Observer, resume: bool) -> dict[str, Any]:
    """Trains as the section `pretrain` says and returns the report, which is also in `report.json`.

    With `resume` continues where an earlier process of the same run ended, however it ended: bit for bit with
    the same number of processes and threads.
    Raises InterruptedRunError after Ctrl-C or SIGTERM, with the state saved.
    """
    return run_stage("pretrain", config, run, observer, resume, _pretrain)


def _pretrain(context: StageContext) -> dict[str, Any]:
    config, section, observer = context.config, context.config.pretrain, context.observer
    files = find_sources(section.sources)
    with context.stop.preparing():
        tokenizer = open_tokenizer(config, context.run.path / RUN_TOKENIZER, files, observer)
        sources = open_sources(files, tokenizer, section, observer)
    model = open_model(config, section, tokenizer)
    return context.train(
        tokenizer, model, sources, lambda window: _heldout(sources, tokenizer, window, section.heldout_tokens)
    )


def _heldout(sources: Sequence[CorpusSource], tokenizer: Tokenizer, window: int, most_tokens: int) -> Heldout:
    found: dict[str, dict[str, list[Document]]] = {}
    for source in sources:
        documents = heldout_documents(source, window, most_tokens)
        middles = heldout_middles(source.corpus, documents, tokenizer, window)
        found[source.name] = {"loss": documents, "middle_loss": middles}
    return found
