"""Supervised fine-tuning: trains a model on recorded sessions of agents."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.agent import agent_format
from etude.config import RunConfig
from etude.controller.mixtures import Heldout, StageContext, open_model, resolve, run_stage, window_of
from etude.controller.sessions import SessionReader, find_sessions, split_heldout
from etude.errors import ConfigError
from etude.observe import Observer, RunDirectory
from etude.tokens.chat_format import ChatFormat
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document
from etude.training.pretraining.sources import SessionSource


def check_sft(config: RunConfig) -> None:
    """Raises ConfigError, before a run directory is made, for settings with which the run cannot start."""
    resolve(config)
    for missing, field, fix in (
        (config.initial_checkpoint is None, "initial_checkpoint", "name the model with --from DIRECTORY"),
        (not config.sft.sources, "sft.sources", "give --data NAME=PATH, or [sft.sources.NAME]"),
    ):
        if missing:
            raise ConfigError("is missing", field=field, fix=fix)
    for name, source in config.sft.sources.items():
        find_sessions(name, source)
    _choose_format(config)


def _choose_format(config: RunConfig) -> ChatFormat:
    """The chat format of the model to fine-tune."""
    return agent_format(Tokenizer.load(Path(str(config.initial_checkpoint))), config.agent)


def fine_tune(config: RunConfig, run: RunDirectory, observer: Observer, resume: bool) -> dict[str, Any]:
    """Trains as the section `sft` says and returns the report; resumes and stops as `pretrain` does."""

    def train(context: StageContext) -> dict[str, Any]:
        config, section = context.config, context.config.sft
        check_sft(config)
        chosen = _choose_format(config)
        model = open_model(config, section, chosen.tokenizer)
        with context.stop.preparing():
            sources, heldout = _open_sources(chosen, config, window_of(model, config), observer)
        return context.train(chosen.tokenizer, model, sources, lambda _: heldout)

    return run_stage("sft", config, run, observer, resume, train)


def _open_sources(
    chosen: ChatFormat, config: RunConfig, window: int, observer: Observer
) -> tuple[list[SessionSource], Heldout]:
    sources: list[SessionSource] = []
    by_source: dict[str, Mapping[str, Sequence[Document]]] = {}
    for name, settings in config.sft.sources.items():
        weight = config.sft.observation_weight
        reader = SessionReader(name, settings, chosen.tokenizer, chosen.renderers, weight, window)
        documents = reader.load()
        skipped = "".join(f", {count} skipped: {reason}" for reason, count in reader.skipped.items())
        observer.say(f"{name}: {len(documents):,} sessions{skipped}")
        kept, heldout = split_heldout(documents, settings.heldout_share)
        sources.append(SessionSource(name, settings, kept))
        by_source[name] = {"loss": _some(heldout, config.sft.heldout_tokens)}
    return sources, by_source


def _some(documents: Sequence[Document], most_tokens: int) -> list[Document]:
    """The first documents, up to `most_tokens` together; at least one, if there are any."""
    totals = itertools.accumulate(len(document.tokens) for document in documents)
    numbered = enumerate(zip(documents, totals, strict=True))
    return [document for place, (document, total) in numbered if place == 0 or total <= most_tokens]
