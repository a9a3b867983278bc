import asyncio
import os
import signal
from random import Random

import pytest

from etude.agent import SessionLimits, SummaryPolicy, core_registry
from etude.records import Relation, Status
from etude.tokens import ETUDE_TEMPLATE, Renderer, train_tokenizer
from etude.tokens.grammar import XmlGrammar
from etude_quickstart.playing import play, play_in_processes
from etude_quickstart.trails import TrailAuthor, TrailGenerator

LIMITS = SessionLimits(max_turns=1000, max_tokens=800, max_message_tokens=100)
SUMMARY = SummaryPolicy(at_tokens=500, max_summary_tokens=60, request="Summarise.")


def renderer() -> Renderer:
    grammar = XmlGrammar(core_registry().schemas)
    controls = [*ETUDE_TEMPLATE.control_tokens, *grammar.control_tokens()]
    return Renderer(train_tokenizer([], 256 + len(controls), controls), grammar)


def play_trail(note_key, summary=SUMMARY, number=0, slip=0.0):
    task = TrailGenerator(5, "heldout", (120, 120)).task(number)
    author = TrailAuthor(task, Random(number), note_key, slip)
    session, messages = asyncio.run(play(task, author, renderer(), LIMITS, summary))
    calls = [call for turn in session.turns for call in turn.calls]
    edits = [call.arguments["text"] for call in calls if call.name == "edit_lines"]
    return task, session, messages, edits


def test_an_author_who_notes_the_key_solves_a_trail_of_many_contexts():
    task, session, messages, edits = play_trail(note_key=1.0)
    assert session.status is Status.DONE and len(messages) == 122
    assert session.num_tokens > 3 * LIMITS.max_tokens
    assert [one.relation for one in session.contexts[1:]] == [Relation.SUMMARY] * (len(session.contexts) - 1)
    assert edits == [next(iter(task.solution_files.values())).strip()]


def test_an_author_who_notes_no_key_is_lost():
    solved = 0
    for number in range(8):
        task, session, _, edits = play_trail(note_key=0.0, number=number)
        assert session.status is Status.DONE
        solved += edits == [next(iter(task.solution_files.values())).strip()]
    assert solved == 0


def test_without_summaries_the_window_ends_the_trail():
    _, session, _, edits = play_trail(1.0, summary=None)
    assert (session.status, session.cause, edits) == (Status.LIMIT, "tokens", [])


def test_an_author_who_slips_is_told_so_and_looks_again():
    task, session, messages, edits = play_trail(note_key=1.0, slip=0.2)
    failed = [result for turn in session.turns for result in turn.results if result.error]
    assert len(failed) > 10 and len(messages) == 122 + len(failed)
    assert session.status is Status.DONE
    assert edits[-1] == next(iter(task.solution_files.values())).strip()


def _hear_of_stops(number: int) -> int:
    if number < 0:
        raise ValueError("a chunk that fails")
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    return number


def test_processes_that_play_go_on_when_a_run_is_asked_to_stop():
    assert play_in_processes(_hear_of_stops, [1, 2, 3], 2) == [1, 2, 3]


def test_a_chunk_that_fails_ends_the_others():
    with pytest.raises(ValueError, match="a chunk that fails"):
        play_in_processes(_hear_of_stops, [-1, *range(100)], 1)
