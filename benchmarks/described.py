"""A family of tasks that test code search: many files, and an instruction that names none of them.

A function of the quickstart's generator lacks a `return`; no visible test shows it, and the instruction
paraphrases its docstring. The bug is always the same kind, so that finding the function is what is learnt and
measured. The scripted expert finds it by `semantic_search` where that tool is offered, else by `grep` with
the longest text that instruction and docstring share.

    tasks.family = "described:Described", tasks.options.num_files = 24
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache, partial
from random import Random

import torch

from etude.agent import open_renderer
from etude.agent.index.opening import run_indexes
from etude.agent.prompts import own_control_tokens
from etude.config import SEARCHING, AgentConfig
from etude.controller.expert_chats import ScriptedSession
from etude.controller.families import check_split
from etude.evaluation import ActingTasks
from etude.observe import Observer
from etude.observe.machine import available_cores
from etude.records import Task, ToolCall, ToolResult
from etude.rollout.collect import TaskSource
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer
from etude.training import Document
from etude_quickstart import corpus
from etude_quickstart.bug_fixes import BugFixes
from etude_quickstart.cases import Cases, test_file
from etude_quickstart.edits import ReferenceFix, as_call
from etude_quickstart.functions import NAMES, FunctionSpec
from etude_quickstart.generator import (
    ALLOWED_PATHS,
    HIDDEN_TESTS,
    VISIBLE_TESTS,
    Split,
    TaskGenerator,
)
from etude_quickstart.playing import play_in_processes
from etude_quickstart.sessions import play_script

NUM_FILES = 24
_SEEDS = {"heldout": 1_018, "validation": 1_019}
_VARIANTS = 6
"""Correct functions of each name: repositories share them, and so their embedding vectors."""
_NUM_TESTED = 3
_NUM_HITS = "2"
_CHUNK = 200
_TOKENIZER_SESSIONS = 100
_WORDS = {
    "start at": "begin with", "above": "greater than", "below": "less than", "at least": "no less than",
    "at most": "no more than", "equal to": "the same as", "other than": "different from",
    "plus": "increased by", "minus": "reduced by", "times": "scaled by", "over": "divided by",
    "modulo": "remainder by", "add": "count in", "subtract": "take away", "multiply by": "grow by",
    "set": "let", "to": "be", "return": "give", "append": "collect", "unless": "except when", "if": "where",
    "else": "otherwise", "until": "up to", "through": "as far as", "for": "go over", "in": "among",
    "first": "leading", "last": "trailing", "without": "leaving out", "length": "size", "max": "larger",
    "min": "smaller", "sorted": "in order", "total": "the sum", "and": "as well as", "or": "or else",
}  # fmt: skip
_PHRASE = re.compile(rf"\b({'|'.join(sorted(_WORDS, key=len, reverse=True))})\b")
_HIT = re.compile(r"^([\w./-]+\.py):(\d+)(?:-\d+ .*|: .*)$")
_LINE = re.compile(r"\d+\t(.*)")


def describe(docstring: str) -> str:
    """Paraphrases the docstring; numbers and names stay."""
    return _PHRASE.sub(lambda match: _WORDS[match[0]], docstring.lower())


@lru_cache(maxsize=1 << 12)
def _whole(split: Split, name: str, variant: int) -> tuple[FunctionSpec, Cases]:
    return TaskGenerator(0, split).whole(name, Random(f"{split}/{name}/{variant}"))


def make_task(seed: int, split: Split, number: int, num_files: int) -> Task:
    """The task with this number; a pure function of its arguments."""
    rng = Random(f"described/{seed}/{split}/{number}")
    names = rng.sample(NAMES, num_files)
    broken = TaskGenerator(seed, split).broken("missing_return", names[:1], 1, rng)
    others = [_whole(split, name, rng.randrange(_VARIANTS)) for name in names[1:]]
    files = {spec.path: spec.source for spec, _ in others} | {broken.spec.path: broken.source}
    shown, judged = others[:_NUM_TESTED], [(broken.spec, broken.cases), *others[:_NUM_TESTED]]
    files[VISIBLE_TESTS] = test_file([(spec, cases.visible) for spec, cases in shown])
    return Task(
        id=f"described-{split}-{seed}-{number}",
        instruction=f"wrong: {describe(broken.spec.docstring)}",
        files=dict(sorted(files.items())),
        hidden_files={HIDDEN_TESTS: test_file([(spec, cases.hidden) for spec, cases in judged])},
        solution_files={broken.spec.path: broken.spec.source},
        allowed_paths=ALLOWED_PATHS,
        test_paths=(VISIBLE_TESTS,),
        hidden_test_paths=(HIDDEN_TESTS,),
        metadata={"family": broken.spec.family, "bug_kind": broken.bug.kind, "split": split},
    )


class Finder:
    """Scripted author: finds the function, fixes it, finishes. It knows the fix, but not the file."""

    def __init__(self, task: Task, *, searches: bool) -> None:
        self._fix = ReferenceFix(task)
        self._words = task.instruction.partition(": ")[2]
        self._patterns = _shared_pieces(self._words, self._fix.broken)
        self._call = (
            ToolCall("semantic_search", {"query": self._words, "limit": _NUM_HITS})
            if searches
            else self._grep()
        )

    def _grep(self) -> ToolCall:
        return ToolCall("grep", {"pattern": self._patterns.pop(0)}) if self._patterns else ToolCall("finish")

    def message(self, results: Sequence[ToolResult] | None) -> Sequence[ToolCall]:
        """See Author."""
        if results:
            self._call = self._next(results[0].output.split("\n"))
        return (self._call,)

    def _next(self, lines: list[str]) -> ToolCall:
        if self._call.name == "edit_lines":
            return ToolCall("finish")
        path, shown = self._fix.path, lines
        if self._call.name != "read_file":
            heads = [number for number, line in enumerate(lines) if _HIT.match(line)]
            here = [number for number in heads if lines[number].startswith(f"{path}:")]
            if not here:
                return self._grep()
            end = min((number for number in heads if number > here[0]), default=len(lines))
            shown = lines[here[0] + 1 : end]
        text = [match[1] for match in map(_LINE.fullmatch, shown) if match]
        if text != self._fix.broken:  # the result shows a part of the function, or only its position
            return ToolCall("read_file", {"path": path})
        return as_call(self._fix.right_edit(text), text, by_text=False)


def _shared_pieces(words: str, source: Sequence[str]) -> list[str]:
    """Up to three texts that both contain, the longest first: patterns for `grep`."""
    docstring = next(line for line in source if '"""' in line).strip().strip('"').rstrip(".").split()
    mine = words.rstrip(".").split()
    blocks = SequenceMatcher(None, mine, docstring, autojunk=False).get_matching_blocks()
    pieces = {" ".join(mine[block.a : block.a + block.size]): None for block in blocks if block.size}
    return sorted(pieces, key=len, reverse=True)[:3]


class Described(BugFixes):
    """The family. See the module."""

    splits = tuple(_SEEDS)

    @property
    def acting(self) -> Sequence[ActingTasks]:
        """See TaskFamily."""
        return ()

    def source(self) -> TaskSource:
        """See TaskFamily."""
        return lambda number: make_task(self.config.seed, "train", number, self._num_files)

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        """See TaskFamily."""
        check_split(split, self.splits)
        kind: Split = "heldout" if split == "heldout" else "validation"
        return [make_task(_SEEDS[split], kind, number, self._num_files) for number in range(count)]

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        """See TaskFamily."""
        plain = self.config.agent.model_copy(update={"index": "words"})
        sessions = _play(_TOKENIZER_SESSIONS, plain, self._num_files)
        renderer = open_renderer(_plain_tokenizer(self.config.agent), self.config.agent)
        announced = renderer.tokenizer.decode(renderer.prompt(""))
        texts = [text for session in sessions for text in corpus.session_texts(session)]
        texts += [announced] * _TOKENIZER_SESSIONS
        controls = own_control_tokens(self.config.agent)
        return train_tokenizer(texts, self.config.tokenizer.vocab_size, controls)

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        """Sessions with and without `semantic_search`, half each, with the tools offered; and plain code."""
        config, half = self.config, self.config.midtrain.num_sessions // 2
        plain = config.agent.model_copy(update={"index": "grep"})
        documents: list[Document] = []
        for agent in (config.agent, plain):
            observer.say(f"playing {half} sessions of the finder, agent.index = {agent.index}")
            sessions, spoken = _play(half, agent, self._num_files), open_renderer(renderer.tokenizer, agent)
            documents += corpus.make_documents(sessions, [], spoken, config.midtrain, config.agent.max_tokens)
        return documents

    def sessions(self, count: int, observer: Observer) -> list[ScriptedSession]:
        """See TaskFamily."""
        observer.say(f"playing {count} sessions of the finder")
        return _play(count, self.config.agent, self._num_files)

    @property
    def _num_files(self) -> int:
        return int(self.config.tasks.options.get("num_files", NUM_FILES))


def _plain_tokenizer(agent: AgentConfig) -> Tokenizer:
    controls = own_control_tokens(agent)
    return train_tokenizer([], 256 + len(controls), controls)


def _play(count: int, agent: AgentConfig, num_files: int) -> list[ScriptedSession]:
    chunks = [range(start, min(count, start + _CHUNK)) for start in range(0, count, _CHUNK)]
    num_processes = min(available_cores(), len(chunks))
    parts = play_in_processes(partial(_play_chunk, agent, num_files), chunks, num_processes)
    return [session for part in parts for session in part]


def _play_chunk(agent: AgentConfig, num_files: int, numbers: Sequence[int]) -> list[ScriptedSession]:
    torch.set_num_threads(1)
    renderer = open_renderer(_plain_tokenizer(agent), agent)
    searches = agent.index in SEARCHING

    async def play_all() -> list[ScriptedSession]:
        indexes = run_indexes(agent.index)
        try:
            return [
                await play_script(task, Finder(task, searches=searches), renderer, agent, indexes)
                for task in (make_task(corpus.CORPUS_SEED, "train", number, num_files) for number in numbers)
            ]
        finally:
            if indexes is not None:
                await indexes.close()

    return asyncio.run(play_all())
