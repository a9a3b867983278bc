"""Families of tasks: what a run's model reads first, what it is trained on, and what judges it."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from etude.agent import AgentSession, open_renderer
from etude.agent.prompts import own_control_tokens
from etude.config import RunConfig
from etude.controller.corpus import (
    CORPUS_SEED,
    OBSERVED_SESSIONS,
    PART_SESSIONS,
    TOKENIZER_OBSERVED,
    TOKENIZER_SESSIONS,
    load_fixes,
    load_sessions,
    make_documents,
    train_corpus_tokenizer,
)
from etude.controller.task_sets import load_task_set
from etude.environment.episodes import EpisodeLimits
from etude.errors import ConfigError, TaskError
from etude.kit.importing import import_callable
from etude.observe import Observer
from etude.observe.machine import available_cores
from etude.records import Segment, Task
from etude.rollout.collect import TaskSource
from etude.rollout.corpus import ScriptedSession
from etude.rollout.epochs import EpochSource
from etude.rollout.playing import Author, play
from etude.tasks.acting import ACTING_FAMILIES, ACTING_SUITES, ActingFamily, MixedSource
from etude.tasks.expert import Expert
from etude.tasks.frozen import acting_tasks, evaluation_tasks
from etude.tasks.generator import SPLITS, FunctionSplit, Split, TaskGenerator
from etude.tasks.trails import TrailAuthor, TrailGenerator, check_lengths
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer
from etude.training import Document

_TRAIL_SEED = 20_262
_TOKENIZER_TASKS = 200
_CHUNK = 100


def train_trail_tokenizer(config: RunConfig) -> Tokenizer:
    """A tokenizer for trails, with the template's and the tools' tags as single tokens."""
    source = _source(config)
    texts: list[str] = []
    for number in range(_TOKENIZER_TASKS):
        task = source.task(number)
        texts += [task.instruction, *task.files.values(), *task.solution_files.values(), *task.files]
    texts += [config.agent.summary_request, "[context 2; earlier ones in full: .etude/history/]"] * 20
    return train_tokenizer(texts, config.tokenizer.vocab_size, own_control_tokens())


def trail_documents(config: RunConfig, renderer: Renderer) -> list[Document]:
    """Every context of the author's sessions as one document. A function of the configuration alone."""
    numbers = range(config.midtrain.num_sessions)
    chunks = [numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK)]
    definition = renderer.tokenizer
    with ProcessPoolExecutor(min(available_cores(), len(chunks))) as pool:
        parts = list(pool.map(_play_chunk, [config] * len(chunks), [definition] * len(chunks), chunks))
    return [document for part in parts for document in part]


def _play_chunk(config: RunConfig, tokenizer: Tokenizer, numbers: Sequence[int]) -> list[Document]:
    renderer = open_renderer(tokenizer, config.agent)
    source, limits = _source(config), EpisodeLimits.from_config(config)

    async def play_all() -> list[Document]:
        documents: list[Document] = []
        for number in numbers:
            task = source.task(number)
            author = TrailAuthor(task, Random(f"author/{number}"), config.tasks.trail_note_key)
            session, _ = await play(task, author, renderer, limits.session, limits.summary)
            documents += _documents(session, config)
        return documents

    return asyncio.run(play_all())


def _documents(session: AgentSession, config: RunConfig) -> list[Document]:
    return [_document(session, segment, config) for segment in session.segments()]


def _document(session: AgentSession, segment: Segment, config: RunConfig) -> Document:
    """One context. What failed is shown, not taught; what carries the key weighs more."""
    midtrain = config.midtrain
    weights = np.where(segment.sampled, midtrain.agent_weight, midtrain.observation_weight)
    for turn in session.turns:
        if turn.segment_id != segment.id:
            continue
        if any(result.error for result in turn.results):
            weights[turn.start : turn.end] = 0.0
        elif not turn.calls or turn.calls[0].name == "edit_lines":
            weights[turn.start : turn.end] *= config.tasks.trail_key_weight
    return Document(segment.tokens, weights.astype(np.float32), segment.sampled)


def _source(config: RunConfig) -> TrailGenerator:
    return TrailGenerator(_TRAIL_SEED, "train", config.tasks.trail_lengths)


_EVALUATION_SEED = 1_018


class TaskFamily(Protocol):
    """One family under one configuration."""

    @property
    def splits(self) -> Sequence[str]:
        """What can be judged on."""
        ...

    def train_tokenizer(self, observer: Observer) -> Tokenizer: ...

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        """What mid-training reads."""
        ...

    def scripted_session(self, number: int, renderer: Renderer) -> tuple[Task, list[NDArray[np.int32]]]:
        """A task of the corpus' kind, and the messages with which its scripted author plays it."""
        ...

    def source(self) -> TaskSource:
        """The tasks of reinforcement learning, by number."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What is to be said of the tasks as a run starts, a line each."""
        ...

    @property
    def acting(self) -> Sequence[ActingFamily]:
        """Families that only acting solves and that the run also trains on; each has the split
        `<family>_heldout`."""
        ...

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        """Raises ConfigError for a split that the family does not have."""
        ...


def open_family(config: RunConfig) -> TaskFamily:
    """The family that a configuration names. Raises TaskError for directories of tasks that cannot be
    read, ConfigError for a family of the user's own that cannot be imported."""
    kinds: dict[str, Callable[[RunConfig], TaskFamily]] = {
        "bug_fixes": BugFixes,
        "trails": _Trails,
        "directory": _Directory,
    }
    name = config.tasks.family
    return (kinds.get(name) or import_callable(name, "tasks.family"))(config)


class BugFixes:
    """Small repositories with a planted bug. A family of your own inherits from it: what it leaves as it is,
    the tokenizer and what mid-training reads, are then those of the quickstart."""

    splits: Sequence[str] = SPLITS
    notes: Sequence[str] = ()

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        num_read = min(self.config.midtrain.num_sessions, TOKENIZER_SESSIONS)
        sessions = load_sessions(num_read, observer)
        num_observed = min(self.config.midtrain.num_observed_sessions, TOKENIZER_OBSERVED)
        sessions += load_sessions(num_observed, observer, OBSERVED_SESSIONS)
        return train_corpus_tokenizer(sessions, self.config.tokenizer.vocab_size)

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        midtrain = self.config.midtrain
        sessions = load_sessions(midtrain.num_sessions, observer) + self._acting_sessions(observer)
        fixes = load_fixes(midtrain.num_fix_documents, observer)
        return make_documents(sessions, fixes, renderer, midtrain, self.config.agent.max_tokens)

    def scripted_session(self, number: int, renderer: Renderer) -> tuple[Task, list[NDArray[np.int32]]]:
        task = TaskGenerator(CORPUS_SEED, "train").task(number)
        return task, played_messages(task, Expert(task, Random(number)), renderer, self.config)

    def source(self) -> TaskSource:
        seed, tasks = self.config.seed, self.config.tasks
        fixes = TaskGenerator(seed, "train", level_weights=self.config.rl.level_weights)
        shares = {"observed": tasks.observed_share, "composed": tasks.composed_share}
        if not self.acting:
            return fixes.task
        return MixedSource(seed, fixes.task, {name: shares[name] for name in self.acting})

    @property
    def acting(self) -> Sequence[ActingFamily]:
        tasks = self.config.tasks
        shares = zip(ACTING_FAMILIES, (tasks.observed_share, tasks.composed_share), strict=True)
        return [name for name, share in shares if share]

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        _check_split(split, [*SPLITS, *ACTING_SUITES])
        if split in ACTING_SUITES:
            name, _, acting_split = split.partition("_")
            return acting_tasks(cast(ActingFamily, name), cast(FunctionSplit, acting_split), count)
        return evaluation_tasks(cast(Split, split), count)

    def _acting_sessions(self, observer: Observer) -> list[ScriptedSession]:
        midtrain = self.config.midtrain
        observed = load_sessions(midtrain.num_observed_sessions, observer, OBSERVED_SESSIONS)
        return observed + load_sessions(midtrain.num_part_sessions, observer, PART_SESSIONS)


class _Directory(BugFixes):
    """Tasks of the user's own: a finite set, read once."""

    splits = ("heldout",)

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        tasks, self.notes = load_task_set(Path(config.tasks.directory), "tasks.directory", config)
        if config.tasks.heldout_directory:
            self._trained = tasks
            heldout = Path(config.tasks.heldout_directory)
            self._judged, notes = load_task_set(heldout, "tasks.heldout_directory", config)
            self.notes += notes
        else:
            self._trained, self._judged = _held_apart(tasks, config.tasks.heldout_share)

    @property
    def acting(self) -> Sequence[ActingFamily]:
        return ()

    def source(self) -> TaskSource:
        return EpochSource(self._trained, self.config.seed, self.config.rl.curriculum.epochs)

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        _check_split(split, self.splits)
        return self._judged[:count]


class _Trails:
    splits: Sequence[str] = ("heldout", "heldout_family")
    acting: Sequence[ActingFamily] = ()
    notes: Sequence[str] = ()

    def __init__(self, config: RunConfig) -> None:
        for length in config.tasks.trail_heldout_lengths:
            check_lengths("tasks.trail_heldout_lengths", (length, length))
        self.config = config
        self.source()  # checks the other lengths

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        return train_trail_tokenizer(self.config)

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        observer.say(f"playing {self.config.midtrain.num_sessions} trails")
        return trail_documents(self.config, renderer)

    def scripted_session(self, number: int, renderer: Renderer) -> tuple[Task, list[NDArray[np.int32]]]:
        task = self.source()(number)
        author = TrailAuthor(task, Random(number), self.config.tasks.trail_note_key)
        return task, played_messages(task, author, renderer, self.config)

    def source(self) -> TaskSource:
        tasks, rl = self.config.tasks, self.config.rl
        num_tasks = rl.num_steps * rl.groups_per_step
        source = TrailGenerator(
            self.config.seed, "train", tasks.trail_lengths, tasks.trail_lengths_at_end, num_tasks
        )
        return source.task

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        heldout, longer = self.config.tasks.trail_heldout_lengths
        lengths = {"heldout": heldout, "heldout_family": longer}
        _check_split(split, list(lengths))
        source = TrailGenerator(_EVALUATION_SEED, split, (lengths[split], lengths[split]))
        return [source.task(number) for number in range(count)]


def _held_apart(tasks: Sequence[Task], share: float) -> tuple[list[Task], list[Task]]:
    """(trained on, judged on). Each task's place hangs on its id: others that come or go do not change it
    but at the edge."""
    if len(tasks) < 2:
        raise TaskError(
            "one task cannot be trained on and judged on",
            field="tasks.directory",
            received=len(tasks),
            fix="add tasks, or name tasks.heldout_directory",
        )
    ordered = sorted(tasks, key=lambda task: hashlib.blake2b(task.id.encode()).digest())
    num_judged = min(len(tasks) - 1, math.ceil(share * len(tasks)))
    return ordered[num_judged:], ordered[:num_judged]


def played_messages(
    task: Task, author: Author, renderer: Renderer, config: RunConfig
) -> list[NDArray[np.int32]]:
    """What the author writes in one session on a sandbox in memory, summaries included; tokens of each
    message."""
    limits = EpisodeLimits.from_config(config)
    session, _ = asyncio.run(play(task, author, renderer, limits.session, limits.summary))
    messages: list[NDArray[np.int32]] = []
    for segment in session.segments():
        edges = np.flatnonzero(np.diff(segment.sampled, prepend=False, append=False))
        messages += [segment.tokens[start:end] for start, end in edges.reshape(-1, 2)]
    return messages


def _check_split(split: str, splits: Sequence[str]) -> None:
    if split not in splits:
        raise ConfigError("unknown split", field="split", received=split, fix=f"one of {', '.join(splits)}")
