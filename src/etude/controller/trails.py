"""What a model reads before it is trained on trails: contexts and summaries of a scripted author."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from random import Random

import numpy as np

from etude.agent import AgentSession, open_renderer
from etude.agent.prompts import own_control_tokens
from etude.config import RunConfig
from etude.environment.episodes import EpisodeLimits
from etude.observe.machine import available_cores
from etude.records import Segment
from etude.rollout.playing import play
from etude.tasks.trails import TrailAuthor, TrailGenerator
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer
from etude.training import Document

CORPUS_SEED = 20_262
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
    return TrailGenerator(CORPUS_SEED, "train", config.tasks.trail_lengths)
