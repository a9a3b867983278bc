import asyncio
from pathlib import Path

import numpy as np
import pytest

from etude.agent import SessionLimits, open_renderer
from etude.config import AgentConfig, MidtrainConfig
from etude.controller.expert_chats import ScriptedSession
from etude.observe.observer import RecordingObserver
from etude.records import SamplingParams, TrajectoryId
from etude.tokens import Renderer
from etude_quickstart.code import REWRITE_MARK, fix_documents
from etude_quickstart.corpus import (
    BUG_FIX_SESSIONS,
    CORPUS_SEED,
    OBSERVED_SESSIONS,
    PART_SESSIONS,
    SHIPPED_FIXES,
    SessionCorpus,
    load_fixes,
    load_sessions,
    make_documents,
    train_corpus_tokenizer,
)
from etude_quickstart.generator import TaskGenerator
from etude_quickstart.sessions import generate_corpus, load_corpus, load_lines, save_corpus, save_lines
from tests.environment.playing import new_environment
from tests.fakes.scripted import ScriptedSampler

CONFIG = MidtrainConfig(
    num_code_documents=0, num_rewrite_documents=0, agent_weight=1.0, observation_weight=0.25
)
SEED = 5


@pytest.fixture(scope="module")
def sessions() -> list[ScriptedSession]:
    return generate_corpus(30, SEED, num_workers=1)


@pytest.fixture(scope="module")
def renderer(sessions: list[ScriptedSession]) -> Renderer:
    return open_renderer(train_corpus_tokenizer(sessions, 400), AgentConfig())


def test_a_document_holds_the_very_tokens_that_the_agents_session_holds(
    sessions: list[ScriptedSession], renderer: Renderer
) -> None:
    documents = make_documents(sessions, [], renderer, CONFIG, max_tokens=1 << 20)
    tasks = TaskGenerator(SEED)
    opening = renderer.tokenizer.control_id("<|assistant|>")
    environment = new_environment(session=SessionLimits(max_tokens=1 << 20, max_message_tokens=1 << 20))
    environment.renderer = renderer
    for number, (session, document) in enumerate(zip(sessions, documents, strict=True)):

        def script(session_id: str, context: np.ndarray, turns=session.turns) -> np.ndarray:
            return renderer.message(turns[int((context == opening).sum()) - 1].parts)

        trajectory = asyncio.run(
            environment.run(
                tasks.task(number),
                TrajectoryId("run", "t", 0, 0, 0),
                ScriptedSampler(script),
                (0,),
                SamplingParams(max_tokens=1 << 20),
            )
        )
        (segment,) = trajectory.segments
        assert document.tokens.tolist() == segment.tokens.tolist()
        assert document.agent.tolist() == segment.sampled.tolist()


def test_what_the_agent_wrote_weighs_most_and_what_it_was_shown_less(
    sessions: list[ScriptedSession], renderer: Renderer
) -> None:
    for document in make_documents(sessions, [], renderer, CONFIG, max_tokens=1 << 20):
        assert len(document.tokens) == len(document.weights) == len(document.agent)
        assert set(document.weights[document.agent]) == {1.0}
        assert set(document.weights[~document.agent]) == {0.25}
        assert not document.agent[0]
        assert document.agent[-1]


def test_fixes_rewrites_and_plain_code_come_along_by_weights_of_their_own(
    sessions: list[ScriptedSession], renderer: Renderer
) -> None:
    config = MidtrainConfig(num_rewrite_documents=3, num_code_documents=5, code_weight=0.5, fix_weight=0.75)
    fixes = ["1\tdef f():\n2\t    1\nfix 2\t    return 1"] * 2
    documents = make_documents(sessions, fixes, renderer, config, max_tokens=1 << 20)
    texts = [renderer.tokenizer.decode(document.tokens) for document in documents[len(sessions) :]]
    assert texts[:2] == fixes
    assert len(texts) == 10
    assert all(REWRITE_MARK in text for text in texts[2:5])
    assert all("def " in text for text in texts)
    weights = [set(document.weights) for document in documents[len(sessions) :]]
    assert weights == [{0.5, 0.75}] * 5 + [{0.5}] * 5
    assert not any(document.agent.any() for document in documents[len(sessions) :])


def test_documents_that_do_not_fit_are_left_out_whole(
    sessions: list[ScriptedSession], renderer: Renderer
) -> None:
    whole = make_documents(sessions, [], renderer, CONFIG, max_tokens=1 << 20)
    limit = sorted(len(document.tokens) for document in whole)[len(whole) // 2]
    kept = make_documents(sessions, [], renderer, CONFIG, max_tokens=limit)
    assert [d.tokens.tolist() for d in kept] == [d.tokens.tolist() for d in whole if len(d.tokens) <= limit]
    bare = MidtrainConfig(num_rewrite_documents=5, num_code_documents=5)
    assert make_documents([], [], renderer, bare, max_tokens=16) == []


def write_shipped_sessions(directory: Path, corpus: SessionCorpus, num_sessions: int) -> None:
    """Writes a shipped file of sessions, and a file with their number next to it."""
    sessions = generate_corpus(num_sessions, CORPUS_SEED, num_workers=1, script=corpus.script)
    save_corpus(sessions, directory / corpus.file)
    (directory / corpus.file).with_suffix(".count").write_text(f"{num_sessions}\n")


def write_shipped_fixes(directory: Path, num_fixes: int) -> None:
    """Writes the shipped file of fixes, and a file with their number."""
    save_lines(list(fix_documents(CORPUS_SEED + 1, num_fixes)), directory / SHIPPED_FIXES)
    (directory / SHIPPED_FIXES).with_suffix(".count").write_text(f"{num_fixes}\n")


def test_the_shipped_corpus_is_what_this_code_makes(tmp_path: Path) -> None:
    write_shipped_fixes(tmp_path, 2)
    assert (tmp_path / SHIPPED_FIXES).with_suffix(".count").read_text() == "2\n"
    observer = RecordingObserver()
    for corpus in (BUG_FIX_SESSIONS, OBSERVED_SESSIONS, PART_SESSIONS):
        write_shipped_sessions(tmp_path, corpus, 3)
        assert (tmp_path / corpus.file).with_suffix(".count").read_text() == "3\n"
        assert load_sessions(3, observer, corpus) == load_corpus(tmp_path / corpus.file, 3), "write it anew"
    assert load_fixes(2, observer) == load_lines(tmp_path / SHIPPED_FIXES, 2), "write it anew"
    assert observer.lines == [], "nothing had to be generated"
