"""Mid-training data: the expert's sessions and plain code, as weighted token documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.agent.prompts import own_control_tokens
from etude.config import AgentConfig, MidtrainConfig
from etude.controller.expert_chats import ScriptedSession
from etude.observe import Observer
from etude.observe.machine import available_cores
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer
from etude.training import Document
from etude_quickstart.code import (
    FIX_MARK,
    REWRITE_MARK,
    code_documents,
    fix_documents,
    rewrite_documents,
)
from etude_quickstart.observed_expert import observed_fix_documents
from etude_quickstart.sessions import (
    Script,
    generate_corpus,
    load_corpus,
    load_lines,
    script_bug_fix,
    script_observed,
    script_part,
)

CORPUS_SEED = 20_261
"""Seed of the shipped corpus. Runs of all seeds use this corpus, each in a different order."""
SHIPPED_FIXES = "code-fixes.jsonl.zst"
_FIX_SEED = CORPUS_SEED + 1
"""Seed of the fixes: other tasks than those of the sessions."""
TOKENIZER_SESSIONS, TOKENIZER_OBSERVED = 4_000, 300
"""Numbers of sessions for training a tokenizer: of bug fixes, and of observed tasks if those are used."""
_TOKENIZER_DOCUMENTS = 2_000


@dataclass(frozen=True, slots=True)
class SessionCorpus:
    """Sessions of a scripted author: a shipped file, and the script that generates more."""

    file: str
    script: Script


BUG_FIX_SESSIONS = SessionCorpus("expert-sessions.jsonl.zst", script_bug_fix)
OBSERVED_SESSIONS = SessionCorpus("observed-sessions.jsonl.zst", script_observed)
PART_SESSIONS = SessionCorpus("part-sessions.jsonl.zst", script_part)


def load_sessions(
    num_sessions: int, observer: Observer, corpus: SessionCorpus = BUG_FIX_SESSIONS
) -> list[ScriptedSession]:
    """The first `num_sessions` of a corpus: the shipped ones, then generated ones."""
    path, num_shipped = _shipped(corpus.file)
    sessions = load_corpus(path, min(num_sessions, num_shipped)) if num_shipped else []
    missing = num_sessions - len(sessions)
    if missing > 0:
        observer.say(f"playing {missing} sessions of the scripted expert")
        sessions += generate_corpus(
            missing, CORPUS_SEED, available_cores(), first=len(sessions), script=corpus.script
        )
    return sessions


def load_fixes(num_documents: int, observer: Observer) -> list[str]:
    """The first `num_documents` fix documents: the shipped ones, then generated ones."""
    path, num_shipped = _shipped(SHIPPED_FIXES)
    fixes: list[str] = load_lines(path, min(num_documents, num_shipped)) if num_shipped else []
    missing = num_documents - len(fixes)
    if missing > 0:
        observer.say(f"writing {missing} fixes")
        fixes += fix_documents(_FIX_SEED, missing, first=len(fixes))
    return fixes


def train_corpus_tokenizer(
    sessions: Sequence[ScriptedSession], vocab_size: int, agent: AgentConfig | None = None
) -> Tokenizer:
    """A tokenizer for sessions and code, with the template's and the tools' tags as single tokens."""
    texts = [text for session in sessions for text in session_texts(session)]
    texts += code_documents(CORPUS_SEED, _TOKENIZER_DOCUMENTS)
    return train_tokenizer(texts, vocab_size, own_control_tokens(agent))


def make_documents(
    sessions: Sequence[ScriptedSession],
    fixes: Sequence[str],
    renderer: Renderer,
    config: MidtrainConfig,
    max_tokens: int,
) -> list[Document]:
    """Sessions, fixes, rewrites and code as documents, without those of more than `max_tokens` tokens."""
    documents = [_session_document(session, renderer, config) for session in sessions]
    documents += [_fix_document(text, FIX_MARK, renderer, config) for text in fixes]
    for text in observed_fix_documents(_FIX_SEED, config.num_observed_fixes):
        documents.append(_fix_document(text, FIX_MARK, renderer, config))
    for text in rewrite_documents(CORPUS_SEED, config.num_rewrite_documents):
        documents.append(_fix_document(text, REWRITE_MARK, renderer, config))
    for text in code_documents(CORPUS_SEED, config.num_code_documents):
        documents.append(_weighted([(renderer.tokenizer.encode(text), config.code_weight)]))
    return [document for document in documents if len(document.tokens) <= max_tokens]


def _fix_document(text: str, mark: str, renderer: Renderer, config: MidtrainConfig) -> Document:
    """A fix document: the broken file has the weight of code, the correction the weight of fixes."""
    broken, _, fix = text.rpartition(mark)
    encode = renderer.tokenizer.encode
    return _weighted([(encode(broken), config.code_weight), (encode(mark + fix), config.fix_weight)])


def _weighted(parts: Sequence[tuple[NDArray[np.int32], float]]) -> Document:
    tokens = np.concatenate([part for part, _ in parts])
    weights = np.concatenate([np.full(len(part), weight, dtype=np.float32) for part, weight in parts])
    return Document(tokens, weights, np.zeros(len(tokens), dtype=np.bool_))


def _session_document(session: ScriptedSession, renderer: Renderer, config: MidtrainConfig) -> Document:
    """The tokens that the session would have in a rollout, with the agent's tokens marked."""
    parts = [renderer.prompt(session.instruction)]
    written = [False]
    for turn in session.turns:
        parts.append(renderer.message(turn.parts))
        written.append(True)
        if turn.outputs:
            parts.append(renderer.observations(turn.outputs))
            written.append(False)
    agent = np.repeat(np.array(written), [len(part) for part in parts])
    weights = np.where(agent, config.agent_weight, config.observation_weight).astype(np.float32)
    return Document(np.concatenate(parts), weights, agent)


def session_texts(session: ScriptedSession) -> list[str]:
    """All texts of a session: instruction, messages, tool outputs."""
    texts = [session.instruction]
    for turn in session.turns:
        for part in turn.parts:
            texts += [part] if isinstance(part, str) else list(part.arguments.values())
        texts += turn.outputs
    return texts


def _shipped(name: str) -> tuple[Path, int]:
    """(path of a shipped file, its number of documents; 0 if it is missing)."""
    path = Path(str(files("etude_quickstart") / "data" / name))
    count = path.with_suffix(".count")
    return path, int(count.read_text(encoding="utf-8")) if path.exists() and count.exists() else 0
