import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.simulated_user import UNKNOWN, SimulatedUser, words
from etude.errors import ConfigError, UserAbortedError

FACTS = (
    "Amounts are stored in cents, never in euros.",
    "The parser must accept Windows line endings.",
    "Python 3.9 has to go on working.",
    "userId is a UUID; customer numbers are integers.",
)


def ask(user, *questions, options=()):
    async def run():
        return [await user.answer(question, options) for question in questions]

    return asyncio.run(run())


def test_a_question_is_answered_by_the_fact_that_fits():
    questions = {
        "Which unit do the amounts have?": 0,
        "Are amounts in euros or cents?": 0,
        "should line_endings of Windows files be parsed": 1,
        "Which Python versions must work?": 2,
        "What type is user_id?": 3,
    }
    assert ask(SimulatedUser(FACTS), *questions) == [FACTS[n] for n in questions.values()]


def test_what_the_user_does_not_know_is_not_made_up():
    user = SimulatedUser(FACTS)
    unknown = [
        "Which database shall I use?",
        "why?",
        "",
        "?" * 500,
        "Do you like the colour of the new logo best?",
    ]
    assert set(ask(user, *unknown)) == {UNKNOWN}
    assert set(ask(SimulatedUser(()), "anything?")) == {UNKNOWN}
    assert set(ask(SimulatedUser(("",)), "anything?")) == {UNKNOWN}


def test_topics_help_to_find_a_fact():
    user = SimulatedUser({"currency": "Cents, always.", "deadline": "Friday."})
    assert ask(user, "What currency is meant?", "when is the deadline?") == ["Cents, always.", "Friday."]


def test_a_user_with_options_chooses_the_one_that_is_right():
    user = SimulatedUser(("Amounts are stored in cents.",))
    assert ask(user, "Unit of the amounts?", options=("euros", "cents")) == ["cents"]
    # None stands out: the fact says more than a guess.
    assert ask(user, "Unit of stored amounts?", options=("yen", "baht")) == ["Amounts are stored in cents."]


def test_repeats_cost_nothing_and_are_counted():
    user = SimulatedUser(FACTS, limit=2)
    ask(user, "unit of amounts?", "UNIT of the amounts", "which Python?", "unit of amounts?")
    assert (user.num_questions, user.num_repeats, user.num_unknown) == (4, 2, 0)
    with pytest.raises(UserAbortedError, match="decide yourself"):
        ask(user, "Windows line endings?")


def test_a_negative_limit_is_refused():
    with pytest.raises(ConfigError, match="negative"):
        SimulatedUser((), limit=-1)


@given(st.lists(st.text(max_size=30), max_size=5), st.lists(st.text(max_size=30), max_size=5))
def test_answers_are_facts_and_always_the_same(facts, questions):
    first = ask(SimulatedUser(facts, limit=99), *questions)
    user = SimulatedUser(facts, limit=99)
    backwards = ask(user, *reversed(questions))
    assert set(first) <= {*facts, UNKNOWN}
    # Questions with the same words are the same question: which of them came first does not matter.
    assert first == backwards[::-1]


def test_words_are_split_and_lose_their_endings():
    assert words("parse_lineEndings HTTPServers 42") == ["pars", "lin", "end", "http", "server", "42"]
