import asyncio
import json
from pathlib import Path
from random import Random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from etude.controller.expert_chats import ScriptedSession, ScriptedTurn
from etude.errors import StoreError
from etude.records import ToolCall
from etude_quickstart.expert import Expert
from etude_quickstart.generator import TaskGenerator
from etude_quickstart.sessions import generate_corpus, load_corpus, play_script, save_corpus
from etude_quickstart.skill import PERFECT_SKILL
from tests.environment.playing import renderer


@pytest.fixture(scope="module")
def corpus() -> list[ScriptedSession]:
    return generate_corpus(120, seed=5, num_workers=1)


@pytest.mark.slow
def test_a_corpus_is_a_function_of_seed_and_number_and_not_of_the_workers(
    corpus: list[ScriptedSession],
) -> None:
    assert generate_corpus(120, seed=5, num_workers=2) == corpus
    assert generate_corpus(4, seed=5, num_workers=1, first=90) == corpus[90:94]
    assert generate_corpus(4, seed=6, num_workers=1) != corpus[:4]


@pytest.mark.slow
def test_sessions_are_played_through_the_tools(corpus: list[ScriptedSession]) -> None:
    outputs = [output for session in corpus for turn in session.turns for output in turn.outputs]
    assert any(output.startswith("1\tdef ") for output in outputs)
    assert any("passed" in output for output in outputs)
    assert any(output.startswith("FAIL test_") for output in outputs)
    for session in corpus:
        assert all(turn.outputs for turn in session.turns[:-1])
        assert session.turns[-1].outputs == (), "nobody reads the results of the last message"
    raw = [part for s in corpus for turn in s.turns for part in turn.parts if isinstance(part, str)]
    assert raw, "the expert errs on purpose"


def test_an_expert_of_another_skill_plays_another_session() -> None:
    task = TaskGenerator(5).task(0)
    session = asyncio.run(play_script(task, Expert(task, Random(0), PERFECT_SKILL), renderer()))
    assert session.instruction == task.instruction
    assert session.turns[-1].parts[-1] == ToolCall("finish")
    before = [output for turn in session.turns for output in turn.outputs]
    assert before[-1].endswith(" passed") and "failed" not in before[-1]


def test_a_saved_corpus_comes_back_equal(corpus: list[ScriptedSession], tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.zst"
    save_corpus(corpus, path)
    assert load_corpus(path, len(corpus)) == corpus
    assert load_corpus(path, 7) == corpus[:7]


texts = st.text(st.characters(codec="utf-8"), max_size=12)
parts = st.one_of(texts, st.builds(ToolCall, texts, st.dictionaries(texts, texts, max_size=2)))
turns = st.builds(
    ScriptedTurn, st.lists(parts, max_size=3).map(tuple), st.lists(texts, max_size=3).map(tuple)
)
sessions = st.builds(ScriptedSession, texts, st.lists(turns, max_size=3).map(tuple))


@given(st.lists(sessions, min_size=1, max_size=3))
def test_any_session_survives_saving(tmp_path_factory, wanted: list[ScriptedSession]) -> None:
    path = tmp_path_factory.mktemp("corpus") / "c.zst"
    save_corpus(wanted, path)
    assert load_corpus(path, len(wanted)) == wanted


@given(st.data())
def test_a_damaged_byte_is_found(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "c.zst"
    corpus = [ScriptedSession(f"fix test_{n}", (ScriptedTurn((ToolCall("finish"),), ()),)) for n in range(3)]
    save_corpus(corpus, path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    # A flip in a field that means nothing (a window size, say) may leave the content whole.
    try:
        assert load_corpus(path, 3) == corpus
    except StoreError as error:
        assert error.field == "corpus"


def test_a_file_that_ends_early_is_found(corpus: list[ScriptedSession], tmp_path: Path) -> None:
    path = tmp_path / "c.zst"
    save_corpus(corpus[:20], path)
    content = path.read_bytes()
    for length in (0, 1, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(StoreError):
            load_corpus(path, 20)


@pytest.mark.parametrize(
    "line", ["{", "3", '["words"]', '["words", [[["x"]]]]', '["words", [[[["x"]], []]]]']
)
def test_lines_that_are_no_sessions_are_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "c.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(f"{json.dumps(['w', []])}\n{line}".encode()))
    assert load_corpus(path, 1) == [ScriptedSession("w", ())]
    with pytest.raises(StoreError, match="line 2"):
        load_corpus(path, 2)


def test_a_corpus_that_is_too_short_or_missing_is_told(corpus: list[ScriptedSession], tmp_path: Path) -> None:
    path = tmp_path / "c.zst"
    save_corpus(corpus[:3], path)
    with pytest.raises(StoreError, match="holds 3 "):
        load_corpus(path, 4)
    with pytest.raises(StoreError, match="cannot be read"):
        load_corpus(tmp_path / "none", 1)
