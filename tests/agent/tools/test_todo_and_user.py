import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tool_scenes import in_memory

from etude.agent import ToolLimits, simulated_user
from etude.agent.simulated_user import SimulatedUser
from etude.agent.tools.ask_user import AskUser
from etude.agent.tools.finish import Finish
from etude.agent.tools.ports import CodeHit, CodeHits
from etude.agent.tools.semantic_search import SemanticSearch
from etude.agent.tools.state import ToolState
from etude.agent.tools.todo_write import TodoWrite
from etude.errors import InfrastructureError
from etude.records import ToolErrorClass


def todo(*writes, state=None):
    async def scenario(call, context):
        return [await call(**write) for write in writes], context.state

    return in_memory([TodoWrite()], scenario, state=state or ToolState())


def listed(*entries):
    return {"todos": json.dumps(entries)}


def test_the_list_is_written_merged_and_replaced():
    results, state = todo(
        listed({"id": "a", "text": "read the parser", "status": "in_progress"}, {"text": "mend\n it"}),
        {**listed({"id": "a", "status": "done"}, {"id": "c", "text": "test"}), "merge": "true"},
        listed(),
    )
    assert [result.output for result in results] == [
        "[>] a read the parser\n[ ] 2 mend it",
        "[x] a read the parser\n[ ] 2 mend it\n[ ] c test",
        "empty",
    ]
    assert results[1].facts == {"kind": "todo", "todos": results[1].output} and state.todos == []


def test_the_list_survives_being_laid_aside():
    _, state = todo(listed({"id": "1", "text": "x", "status": "cancelled"}))
    again = ToolState.from_dict(json.loads(json.dumps(state.to_dict())))
    (result,), _ = todo({**listed({"id": "2", "text": "y"}), "merge": "true"}, state=again)
    assert result.output == "[-] 1 x\n[ ] 2 y"


@pytest.mark.parametrize(
    ("todos", "message"),
    [
        ("- a list", "todos is no JSON: "),
        ("{}", "todos must be a list"),
        ('["x"]', "entry 1 must be an object"),
        ('[{"id": "1"}]', "entry 1: text is missing"),
        ('[{"text": "x", "status": "started"}]', "entry 1: status must be one of pending, in_progress"),
        ('[{"text": "x", "status": []}]', "entry 1: status must be one of"),
        ('[{"text": "x", "priority": 1}]', "entry 1: unknown key priority"),
        ('[{"text": "x", "id": 1.5}]', "entry 1: id must be text"),
        ('[{"text": "x", "id": ""}]', "entry 1: id must have 1 to 20"),
        ('[{"text": "x"}, {"text": "y", "id": 1}]', "entry 2: id 1 stands twice"),
        (json.dumps([{"text": "x" * 300}]), "entry 1: more than 200 characters"),
        (json.dumps([{"text": "x"}] * 51), "more than 50 entries"),
        ("[" * 100_000, "todos is no JSON"),
        ('["' + "x" * (2 << 20) + '"]', "todos is too long"),
    ],
)
def test_a_list_that_is_none_changes_nothing(todos, message):
    (_, wrong), state = todo(listed({"text": "kept"}), {"todos": todos})
    assert wrong.output.startswith(f"error: {message}") and len(wrong.output) < 200
    assert wrong.error == ToolErrorClass.INVALID_ARGUMENTS
    assert [entry.text for entry in state.todos] == ["kept"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "text", "status", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(values | st.text(max_size=30))
def test_any_json_is_a_list_or_an_error_of_the_agents(value):
    text = value if isinstance(value, str) else json.dumps(value)
    (result,), state = todo({"todos": text})
    assert result.error in (None, ToolErrorClass.INVALID_ARGUMENTS)
    result.output.encode()
    json.dumps(state.to_dict())


def ask(*questions, user=None):
    async def scenario(call, context):
        return [await call(**question) for question in questions], context.state.num_questions

    return in_memory([AskUser()], scenario, user=user)


def test_questions_go_to_the_user_and_are_counted(monkeypatch):
    monkeypatch.setattr(simulated_user, "NUM_ANSWERS", 1)
    user = SimulatedUser(("Amounts are in cents.",))
    (first, second, late), count = ask(
        {"question": "Unit of amounts?", "options": "euros\ncents"},
        {"question": "unit of amounts", "options": '["euros", "cents"]'},
        {"question": "what else?"},
        user=user,
    )
    assert first.output == second.output == "cents" and first.facts == {"kind": "question", "answered": True}
    assert late.error == ToolErrorClass.USER_ABORTED and "decide yourself" in late.output
    assert count == 3


def test_where_nobody_is_the_agent_decides():
    (result,), count = ask({"question": "Shall I?"})
    assert result.output == "error: no user is there; decide yourself" and count == 1
    assert result.error == ToolErrorClass.USER_ABORTED and result.facts["answered"] is False


def test_questions_without_words_are_refused():
    results, count = ask(
        {"question": " "}, {"question": "x" * 3000}, {"question": "x", "options": "\n".join("abcdefghi")}, {}
    )
    assert [result.output for result in results] == [
        "error: question is empty",
        "error: more than 2000 characters",
        "error: options has more than 8 entries",
        "error: missing question",
    ]
    assert count == 0


class Index:
    """`CodeSearch` with one answer."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def semantic(self, query, limit, path="."):
        self.asked.append((query, limit, path))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def search(index, *calls):
    async def scenario(call, context):
        return [await call(**arguments) for arguments in calls]

    return in_memory([SemanticSearch()], scenario, search=index, limits=ToolLimits(provider_backoff_s=0.001))


def test_pieces_of_code_are_shown_with_their_places():
    text = "def tally(xs):\n" + "    x\n" * 20
    index = Index(CodeHits((CodeHit("lib/a.py", 3, 23, "tally", 0.9, text),), complete=False))
    (result,) = search(index, {"query": " sum of numbers ", "path": "/workspace/lib/", "limit": "3"})
    lines = result.output.split("\n")
    assert lines[:2] == ["lib/a.py:3-23 tally", "3\tdef tally(xs):"]
    assert lines[-3:] == ["... 9 more lines", "", "the index is not complete yet"]
    assert index.asked == [("sum of numbers", 3, "lib")]
    assert result.facts == {"kind": "semantic_search", "num_hits": 1, "complete": False}


def test_searches_that_make_no_sense_are_refused():
    index = Index(CodeHits(()))
    calls = [
        {"query": ""},
        {"query": "x", "limit": "0"},
        {"query": "x", "path": "../y"},
        {"query": "x" * 1001},
    ]
    assert [result.output for result in search(index, *calls)] == [
        "error: query is empty",
        "error: limit must be 1 to 20",
        "error: the path leaves the workspace",
        "error: more than 1000 characters",
    ]
    assert [result.output for result in search(index, {"query": "x"})] == ["no match"]
    (absent,) = search(None, {"query": "x"})
    assert (absent.output, absent.error) == ("error: no index", ToolErrorClass.UNEXPECTED_ENVIRONMENT)


def test_an_index_that_fails_is_never_an_answer():
    with pytest.raises(InfrastructureError):
        search(Index(InfrastructureError("the model does not answer")), {"query": "x"})


def test_finish_ends_the_session():
    async def scenario(call, context):
        return await call()

    result = in_memory([Finish()], scenario)
    assert result.finished and result.output == ""
