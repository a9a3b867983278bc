import pytest
from tests.fakes.web import FakeWeb
from tool_scenes import in_memory

from etude.agent import ToolLimits
from etude.agent.tools.fetch import Fetch
from etude.agent.tools.web_search import WebSearch
from etude.errors import InfrastructureError
from etude.records import ToolErrorClass

PAGES = {
    "https://docs.example.org/a": "<title>Sorting</title><p>How to sort a list.",
    "https://docs.example.org/b": "sort by key\x1b[31m",
    "https://docs.example.org/down": InfrastructureError("the server answered 503"),
}
QUICK = ToolLimits(provider_backoff_s=0.001)


def use(web, *calls, limits=QUICK):
    async def scenario(call, context):
        results = [await call(name, **arguments) for name, arguments in calls]
        return results, context

    return in_memory([Fetch(), WebSearch()], scenario, web=web, limits=limits)


def test_pages_and_results_are_shown():
    (page, plain, found, nothing), _ = use(
        FakeWeb(PAGES),
        ("fetch", {"url": " https://docs.example.org/a "}),
        ("fetch", {"url": "https://docs.example.org/b"}),
        ("web_search", {"query": "sort  list", "limit": "2"}),
        ("web_search", {"query": "quark"}),
    )
    assert page.output == "# Sorting\nHow to sort a list." and plain.output == "sort by key"
    assert found.output == (
        "Sorting\nhttps://docs.example.org/a\nHow to sort a list.\n\nhttps://docs.example.org/b\nsort by key"
    )
    assert nothing.output == "no match" and nothing.facts == {"kind": "web_search", "num_results": 0}


def test_long_pages_are_kept_in_a_file():
    (page,), _ = use(
        FakeWeb({"https://a.example.org": "x" * 100}),
        ("fetch", {"url": "https://a.example.org"}),
        limits=ToolLimits(output_characters=20),
    )
    assert "all in .etude/outputs/1.txt" in page.output


def test_a_page_that_stays_dead_is_tried_again_and_then_raised():
    web = FakeWeb(PAGES)
    with pytest.raises(InfrastructureError, match="503"):
        use(web, ("fetch", {"url": "https://docs.example.org/down"}))
    assert web.fetched == ["https://docs.example.org/down"] * QUICK.provider_attempts
    with pytest.raises(InfrastructureError, match="gone"):
        use(FakeWeb({}, search_error=InfrastructureError("gone")), ("web_search", {"query": "x"}))


def test_what_the_agent_asked_wrongly_is_an_answer():
    results, _ = use(
        FakeWeb(PAGES),
        ("fetch", {"url": "https://docs.example.org/none"}),
        ("fetch", {"url": " "}),
        ("web_search", {"query": " "}),
        ("web_search", {"query": "x" * 401}),
        ("web_search", {"query": "x", "limit": "99"}),
    )
    assert [result.output for result in results] == [
        "error: no such page (404)",
        "error: url is empty",
        "error: query is empty",
        "error: more than 400 characters",
        "error: limit must be 1 to 10",
    ]
    assert {result.error for result in results} == {ToolErrorClass.INVALID_ARGUMENTS}


def test_without_a_web_the_tools_say_so():
    results, _ = use(None, ("fetch", {"url": "https://a.example.org"}), ("web_search", {"query": "x"}))
    assert {result.output for result in results} == {"error: there is no web here"}
    assert {result.error for result in results} == {ToolErrorClass.UNEXPECTED_ENVIRONMENT}
