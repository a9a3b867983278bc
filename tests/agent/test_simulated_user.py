import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.simulated_user import NUM_ANSWERS, UNKNOWN, SimulatedUser, words
from etude.errors import UserAbortedError

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


def test_a_user_with_options_chooses_the_one_that_is_right():
    user = SimulatedUser(("Amounts are stored in cents.",))
    assert ask(user, "Unit of the amounts?", options=("euros", "cents")) == ["cents"]
    # None stands out: the fact says more than a guess.
    assert ask(user, "Unit of stored amounts?", options=("yen", "baht")) == ["Amounts are stored in cents."]


def test_repeats_cost_nothing_and_what_is_asked_beyond_the_limit_is_not_answered():
    user = SimulatedUser(FACTS)
    ask(user, "unit of amounts?", "UNIT of the amounts", *(f"question {n}" for n in range(NUM_ANSWERS - 1)))
    assert ask(user, "unit of amounts?") == [FACTS[0]]
    with pytest.raises(UserAbortedError, match="decide yourself"):
        ask(user, "Windows line endings?")


@given(st.lists(st.text(max_size=30), max_size=5), st.lists(st.text(max_size=30), max_size=5))
def test_answers_are_facts_and_always_the_same(facts, questions):
    first = ask(SimulatedUser(facts), *questions)
    user = SimulatedUser(facts)
    backwards = ask(user, *reversed(questions))
    assert set(first) <= {*facts, UNKNOWN}
    # Questions with the same words are the same question: which of them came first does not matter.
    assert first == backwards[::-1]


def test_words_are_split_and_lose_their_endings():
    assert words("parse_lineEndings HTTPServers 42") == ["pars", "lin", "end", "http", "server", "42"]
