"""Families of tasks: what a run's model reads first, what it is trained on, and what judges it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from etude.config import RunConfig
from etude.controller.corpus import load_fixes, load_sessions, make_documents, train_corpus_tokenizer
from etude.controller.trails import trail_documents, train_trail_tokenizer
from etude.errors import ConfigError
from etude.observe import Observer
from etude.records import Task
from etude.rollout.collect import TaskSource
from etude.tasks.frozen import evaluation_tasks
from etude.tasks.generator import SPLITS, Split, TaskGenerator
from etude.tasks.trails import TrailGenerator
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document

_EVALUATION_SEED = 1_018


class TaskFamily(Protocol):
    """One family under one configuration."""

    def train_tokenizer(self, observer: Observer) -> Tokenizer: ...

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        """What mid-training reads."""
        ...

    def source(self) -> TaskSource:
        """The tasks of reinforcement learning, by number."""
        ...

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        """Raises ConfigError for a split that the family does not have."""
        ...


def open_family(config: RunConfig) -> TaskFamily:
    """The family that a configuration names."""
    return _Trails(config) if config.tasks.family == "trails" else _BugFixes(config)


class _BugFixes:
    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        sessions = load_sessions(self._config.midtrain.num_sessions, observer)
        return train_corpus_tokenizer(sessions, self._config.tokenizer.vocab_size)

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        midtrain = self._config.midtrain
        sessions = load_sessions(midtrain.num_sessions, observer)
        fixes = load_fixes(midtrain.num_fix_documents, observer)
        return make_documents(sessions, fixes, renderer, midtrain, self._config.agent.max_tokens)

    def source(self) -> TaskSource:
        return TaskGenerator(self._config.seed, "train", level_weights=self._config.rl.level_weights).task

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        _check_split(split, SPLITS)
        return evaluation_tasks(cast(Split, split), count)


class _Trails:
    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        return train_trail_tokenizer(self._config)

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        observer.say(f"playing {self._config.midtrain.num_sessions} trails")
        return trail_documents(self._config, renderer)

    def source(self) -> TaskSource:
        tasks, rl = self._config.tasks, self._config.rl
        num_tasks = rl.num_steps * rl.groups_per_step
        source = TrailGenerator(
            self._config.seed, "train", tasks.trail_lengths, tasks.trail_lengths_at_end, num_tasks
        )
        return source.task

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        heldout, longer = self._config.tasks.trail_heldout_lengths
        lengths = {"heldout": heldout, "heldout_family": longer}
        _check_split(split, list(lengths))
        source = TrailGenerator(_EVALUATION_SEED, split, (lengths[split], lengths[split]))
        return [source.task(number) for number in range(count)]


def _check_split(split: str, splits: Sequence[str]) -> None:
    if split not in splits:
        raise ConfigError("unknown split", field="split", received=split, fix=f"one of {', '.join(splits)}")
