"""Continued pre-training: corpora in, a model with its tokenizer out, resumable at any step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etude.config import RunConfig
from etude.controller.compute import settle_compute
from etude.controller.corpora import (
    find_sources,
    heldout_documents,
    heldout_middles,
    open_sources,
    open_tokenizer,
)
from etude.controller.mixtures import (
    Heldout,
    Learner,
    Sitting,
    open_drafts,
    open_model,
    open_stop,
    settle,
    window_of,
)
from etude.controller.train import TOKENIZER
from etude.observe import JsonlSink, Observer, RunDirectory
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document
from etude.training.pretraining.mixture import Mixture
from etude.training.pretraining.sources import CorpusSource

STAGE = "pretrain"


def check_pretraining(config: RunConfig) -> None:
    """Refuses, before a run directory is made, what would end the run at once. Raises ConfigError for
    sources that are not there and models that do not fit."""
    find_sources(settle(config).pretrain.sources)


def pretrain(config: RunConfig, run: RunDirectory, observer: Observer, resume: bool) -> dict[str, Any]:
    """Trains as the section `pretrain` says and returns the report, which `report.json` holds as well.

    With `resume` goes on where an earlier sitting of the same run ended, however it ended, bit for bit.
    Raises InterruptedRunError after Ctrl-C or SIGTERM, with the state saved.
    """
    with run.lock():
        report: dict[str, Any] = (run.read_json(run.report_file) or {}) if resume else {}
        if report.get("complete"):
            observer.say("the run is finished already")
            return report
        with JsonlSink(run.metrics_file) as metrics, open_stop(config, run, metrics, observer) as stop:
            config = settle_compute(run, settle(config), observer)
            section = config.pretrain
            files = find_sources(section.sources)
            tokenizer = open_tokenizer(config, run.path / TOKENIZER, files, observer)
            sources = open_sources(files, tokenizer, section, observer)
            model = open_model(config, section, tokenizer)
            learner = Learner(tokenizer, model, open_drafts(config, section, model))
            window = window_of(model, config)
            mixture = Mixture(sources, section.tokens_per_step, section.pool_tokens, window, config.seed)
            sitting = Sitting(config, section, STAGE, run, observer, stop, metrics, report)
            return sitting.train(
                learner, mixture, lambda window: _heldout(sources, tokenizer, window, section.heldout_tokens)
            )


def _heldout(sources: Sequence[CorpusSource], tokenizer: Tokenizer, window: int, most_tokens: int) -> Heldout:
    found: dict[str, dict[str, list[Document]]] = {}
    for source in sources:
        documents = heldout_documents(source, window, most_tokens)
        middles = heldout_middles(source.corpus, documents, tokenizer, window)
        found[source.name] = {"loss": documents, "middle_loss": middles}
    return found
