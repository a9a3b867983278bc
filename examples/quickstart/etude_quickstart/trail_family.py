"""The family `trails`: chains of files, longer than a context, and the mid-training data for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from etude.agent import AgentSession, open_renderer
from etude.agent.prompts import own_control_tokens
from etude.config import RunConfig
from etude.controller.expert_chats import ScriptedSession
from etude.controller.families import Messages, TaskFamily, check_split
from etude.environment.episodes import EpisodeLimits
from etude.errors import ConfigError
from etude.evaluation import ActingTasks
from etude.observe import Observer
from etude.observe.machine import available_cores
from etude.records import Segment, Task
from etude.rollout.collect import TaskSource
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer
from etude_quickstart.playing import play, play_in_processes
from etude_quickstart.sessions import played_messages
from etude_quickstart.trails import TrailAuthor, TrailGenerator, check_lengths

if TYPE_CHECKING:
    from etude.training import Document  # torch comes with it

_CORPUS_SEED = 20_262
_EVALUATION_SEED = 1_018
_TOKENIZER_TASKS = 200
_CHUNK = 100


class Trails:
    """Chains of files that refer to each other, with a key to remember."""

    splits: Sequence[str] = ("heldout", "heldout_family")
    acting: Sequence[ActingTasks] = ()
    notes: Sequence[str] = ()

    def __init__(self, config: RunConfig) -> None:
        for length in config.tasks.trail_heldout_lengths:
            check_lengths("tasks.trail_heldout_lengths", (length, length))
        self.config = config
        self.source()  # checks the other lengths

    def source(self) -> TaskSource:
        """See TaskFamily."""
        tasks, rl = self.config.tasks, self.config.rl
        num_tasks = rl.num_steps * rl.groups_per_step
        source = TrailGenerator(
            self.config.seed, "train", tasks.trail_lengths, tasks.trail_lengths_at_end, num_tasks
        )
        return source.task

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        """See TaskFamily."""
        heldout, longer = self.config.tasks.trail_heldout_lengths
        lengths = {"heldout": heldout, "heldout_family": longer}
        check_split(split, self.splits)
        source = TrailGenerator(_EVALUATION_SEED, split, (lengths[split], lengths[split]))
        return [source.task(number) for number in range(count)]

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        """See TaskFamily."""
        return train_trail_tokenizer(self.config)

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        """See TaskFamily."""
        observer.say(f"playing {self.config.midtrain.num_sessions} trails")
        return trail_documents(self.config, renderer)

    def scripted_session(self, number: int, renderer: Renderer) -> tuple[Task, Messages]:
        """See TaskFamily."""
        task = self.source()(number)
        author = TrailAuthor(task, Random(number), self.config.tasks.trail_note_key)
        return task, played_messages(task, author, renderer, self.config)

    def sessions(self, count: int, observer: Observer) -> list[ScriptedSession]:
        """Raises ConfigError: a trail's session has several contexts, which a chat cannot represent."""
        raise ConfigError(
            "sessions of trails are longer than a context, and cannot be written as chats",
            field="tasks.family",
            received=self.config.tasks.family,
            fix="use tasks.family=bug_fixes",
        )


_: Callable[[RunConfig], TaskFamily] = Trails  # the type checker reports missing members


def train_trail_tokenizer(config: RunConfig) -> Tokenizer:
    """A tokenizer for trails, with the template's and the tools' tags as single tokens."""
    source = _source(config)
    texts: list[str] = []
    for number in range(_TOKENIZER_TASKS):
        task = source.task(number)
        texts += [task.instruction, *task.files.values(), *task.solution_files.values(), *task.files]
    texts += [config.agent.summary_request, "[context 2; earlier ones in full: .etude/history/]"] * 20
    return train_tokenizer(texts, config.tokenizer.vocab_size, own_control_tokens(config.agent))


def trail_documents(config: RunConfig, renderer: Renderer) -> list[Document]:
    """Every context of the author's sessions as one document. A function of the configuration alone."""
    numbers = range(config.midtrain.num_sessions)
    chunks = [numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK)]
    num_processes = min(available_cores(), len(chunks))
    parts = play_in_processes(partial(_play_chunk, config, renderer.tokenizer), chunks, num_processes)
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
    from etude.training import Document

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
    return TrailGenerator(_CORPUS_SEED, "train", config.tasks.trail_lengths)
