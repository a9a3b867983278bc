"""A model that plays: mid-trained in under a minute, kept under `.cache/` of the checkout.

The setting is the smallest in which everything is real: one kind of bug (a `return` left out), two files,
and an expert that knows the right line's text but mostly writes it in the wrong place.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from random import Random

import torch
from blake3 import blake3

import etude
from etude.agent import core_registry, open_renderer
from etude.config import AgentConfig, RunConfig
from etude.controller.expert_chats import ScriptedSession
from etude.model import LanguageModel
from etude.records import Task, ToolCall
from etude.tokens import ETUDE_TEMPLATE, Renderer, Tokenizer, train_tokenizer
from etude.tokens.grammar import XmlGrammar
from etude.training import NextTokenTrainer, ShuffledDocuments, load_checkpoint, save_checkpoint
from etude_quickstart.corpus import make_documents
from etude_quickstart.expert import Expert
from etude_quickstart.generator import Split, TaskGenerator
from etude_quickstart.sessions import play_script
from etude_quickstart.skill import ExpertSkill

SKILL = ExpertSkill(
    right_edit=0.2,
    other_line=0.0,
    misplaced=1.0,
    idle=0.0,
    retry=0.0,
    rewrite=0.0,
    blind_edit=0.0,
    read_ahead=0.0,
    list_files=1.0,
    test_first=0.0,
    untested_finish=0.0,
    search_replace=0.0,
    pointless_look=0.0,
    malformed=0.02,
    parallel=0.0,
)
CONFIG = RunConfig.model_validate(
    {
        "name": "learning",
        "num_threads": 1,
        "tokenizer": {"vocab_size": 512},
        "model": {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 4,
            "head_dim": 32,
            "num_experts": 4,
            "expert_size": 64,
            "max_positions": 512,
        },
        "agent": {"max_turns": 8, "max_tokens": 384, "max_message_tokens": 48},
        "engine": {"num_slots": 96},
        "midtrain": {
            "num_sessions": 1_500,
            "num_code_documents": 0,
            "num_rewrite_documents": 0,
            "num_steps": 800,
            "tokens_per_step": 1_024,
            "observation_weight": 0.1,
        },
        "rl": {
            "num_steps": 8,
            "groups_per_step": 8,
            "group_size": 8,
            "updates_per_step": 1,
            "max_refill_rounds": 0,
            "loss": {"kind": "cispo", "normalizer": "tokens"},
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 1},
        },
    }
)
_BARE_RETURN = re.compile(r" +return \w+")
_DIGESTED_SESSIONS = 20


def learning_task(split: Split, number: int) -> Task:
    """A task of level 1 whose bug is that `return total` (or another name) reads `total`."""
    generator, rng = TaskGenerator(3, split), Random(f"{split}/{number}")
    while True:
        task = generator.build(f"{split}-{number}", 1, "missing_return", rng)
        (fixed,) = task.solution_files.values()
        if _BARE_RETURN.fullmatch(fixed.split("\n")[int(task.metadata["line"]) - 1]):
            return task


@cache
def learned() -> Path:
    """A Hugging Face directory with the mid-trained model and its tokenizer. Built unless it is there, once
    for all processes that test at the same time."""
    directory = Path(__file__).parents[2] / ".cache" / f"learning-{_digest()}"
    directory.parent.mkdir(exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            _build(directory)
    return directory


def load_learned() -> tuple[Tokenizer, LanguageModel]:
    """Tokenizer and model of `learned`."""
    return Tokenizer.load(learned()), load_checkpoint(learned())[0]


def _build(directory: Path) -> None:
    torch.set_num_threads(1)
    sessions = _sessions(CONFIG.midtrain.num_sessions)
    tokenizer = train_tokenizer(_texts(sessions), CONFIG.tokenizer.vocab_size, _controls())
    renderer, max_tokens = open_renderer(tokenizer, AgentConfig()), CONFIG.agent.max_tokens
    documents = make_documents(sessions, [], renderer, CONFIG.midtrain, max_tokens)
    model = LanguageModel(CONFIG.model, tokenizer.vocab_size)
    model.initialise(CONFIG.seed)
    trainer = NextTokenTrainer(
        model, ShuffledDocuments(documents, CONFIG.midtrain.tokens_per_step, CONFIG.seed), CONFIG.midtrain
    )
    while trainer.num_steps_taken < CONFIG.midtrain.num_steps:
        trainer.step()
    save_checkpoint(directory, model, write_more=tokenizer.save)


def _digest() -> str:
    """Names the checkpoint by all that it comes from: configuration, expert, corpus, model and trainer."""
    state = blake3(repr((CONFIG.model_dump(exclude={"rl"}), SKILL, torch.__version__)).encode())
    state.update(repr(_sessions(_DIGESTED_SESSIONS)).encode())
    source = Path(etude.__file__).parent
    for folder in ("model", "tokens", "training"):
        for file in sorted((source / folder).rglob("*.py")):
            state.update(file.read_bytes())
    return state.hexdigest()[:16]


def _sessions(count: int) -> list[ScriptedSession]:
    controls = _controls()
    renderer = Renderer(
        train_tokenizer([], 256 + len(controls), controls), XmlGrammar(core_registry().schemas)
    )

    async def play(number: int) -> ScriptedSession:
        task = learning_task("train", number)
        return await play_script(task, Expert(task, Random(f"session/{number}"), SKILL), renderer)

    async def play_all() -> list[ScriptedSession]:
        return [await play(number) for number in range(count)]

    return asyncio.run(play_all())


def _controls() -> list[str]:
    return [*ETUDE_TEMPLATE.control_tokens, *XmlGrammar(core_registry().schemas).control_tokens()]


def _texts(sessions: Iterable[ScriptedSession]) -> list[str]:
    return [
        text
        for session in sessions
        for turn in session.turns
        for text in (session.instruction, *turn.outputs, *_written(turn.parts))
    ]


def _written(parts: Iterable[ToolCall | str]) -> Iterable[str]:
    for part in parts:
        yield from [part] if isinstance(part, str) else part.arguments.values()
