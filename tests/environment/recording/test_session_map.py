"""Mapping of growing message histories to token sequences."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from etude.environment.recording.session_map import MapLimits
from etude.errors import SamplerError
from etude.records import Relation, SampleChunk, SampleRequest
from etude.tokens.chat.errors import ContextLengthError
from tests.environment.recording.recording_builders import (
    ChatClient,
    TellingSampler,
    answer_tokens,
    call_text,
    check_recording,
    make_service,
    plain_renderer,
    qwen_tokenizer,
    renderers,
    replies,
)

SYSTEM = {"role": "system", "content": "You are a coding agent."}
USER = {"role": "user", "content": "Fix lib/tally.py."}
THOUGHT = "<think>\nlook first\n</think>\n\n"


def result(answer: dict[str, Any], output: str = "1\tx = 1") -> list[dict[str, Any]]:
    """The answer as a client keeps it, and the results of its calls."""
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    return [message, *({"role": "tool", "tool_call_id": call["id"], "content": output} for call in calls)]


def segments_of(client: ChatClient) -> tuple[Any, ...]:
    return client.service.session_map.segments()


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_a_growing_conversation_is_one_segment_with_the_tokens_of_our_own_session() -> None:
    texts = [f"{THOUGHT}I read.\n{call_text('a.py', 3)}", "Done."]
    sampler = TellingSampler(replies(texts))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        history = [SYSTEM, USER]
        history += result(await client.send(history))
        await client.send(history)

    run(talk())
    (segment,) = segments_of(client)
    renderer = renderers().find(client.service.session_map.branches[0].entries[0].message)
    system = ["You are a coding agent.\n\n", *renderer.grammar.announce(renderer.grammar.tools)]
    expected = np.concatenate(
        [
            renderer.prompt(USER["content"], system),
            answer_tokens(texts[0]),
            renderer.observations(["1\tx = 1"]),
            answer_tokens(texts[1]),
        ]
    )
    assert segment.tokens.tolist() == expected.tolist()
    assert segment.relation is Relation.ROOT and segment.parent is None
    assert segment.num_sampled_tokens == sum(len(answer_tokens(text)) for text in texts)
    check_recording(client.service, sampler)


def altered(message: dict[str, Any], how: str) -> dict[str, Any]:
    """The answer as clients return it."""
    told = {k: v for k, v in message.items() if v is not None}
    if how in ("dropped", "all"):
        told.pop("reasoning_content", None)
    if how in ("trimmed", "all"):
        told["content"] = f"  {told.get('content', '')}\n"
    if how in ("blocks", "all") and told.get("content"):
        words = told["content"]
        told["content"] = [{"type": "text", "text": words[:2]}, {"type": "text", "text": words[2:]}]
    if how in ("json", "all"):
        for call in told.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            if "offset" in arguments:
                arguments["offset"] = float(arguments["offset"])
            again = json.dumps(dict(reversed(arguments.items())), indent=1)
            call["function"] = {"name": call["function"]["name"], "arguments": again}
            call["id"] = call["id"].upper()
    return told


@pytest.mark.parametrize("how", ["dropped", "trimmed", "blocks", "json", "all"])
def test_what_clients_do_to_answers_does_not_break_the_sequence(how: str) -> None:
    sampler = TellingSampler(replies([f"{THOUGHT}I read.\n{call_text('a.py', 3)}"] * 3))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        history = [SYSTEM, USER]
        for _ in range(3):
            message, *_ = result(await client.send(history))
            told = altered(message, how)
            call_id = told["tool_calls"][0]["id"]
            history += [told, {"role": "tool", "tool_call_id": call_id, "content": "ok"}]

    run(talk())
    (segment,) = segments_of(client)
    assert segment.num_sampled_tokens == 3 * len(answer_tokens(f"{THOUGHT}I read.\n{call_text('a.py', 3)}"))
    assert client.service.session_map.counts.continued == 2
    check_recording(client.service, sampler)


def test_another_text_another_argument_or_other_reasoning_is_a_rewrite() -> None:
    for change in ("text", "argument", "reasoning"):
        sampler = TellingSampler(replies([f"{THOUGHT}I read.\n{call_text('a.py')}", "Done."]))
        client = ChatClient(make_service(sampler))

        async def talk(client: ChatClient = client, change: str = change) -> None:
            message, output = result(await client.send([SYSTEM, USER]))
            if change == "text":
                message["content"] = "I wrote."
            elif change == "argument":
                message["tool_calls"][0]["function"]["arguments"] = '{"path": "b.py"}'
            else:
                message["reasoning_content"] = "something else"
            await client.send([SYSTEM, USER, message, output])

        run(talk())
        first, second = segments_of(client)
        assert second.relation is Relation.REWRITE
        assert second.parent is not None and second.parent[0] == first.id
        assert second.num_sampled_tokens == len(answer_tokens("Done."))
        check_recording(client.service, sampler)


def test_a_retry_is_a_fork_and_the_answer_that_nobody_used_is_named() -> None:
    sampler = TellingSampler(replies(["One.", "Two.", "Three."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        await client.send([SYSTEM, USER])
        second = await client.send([SYSTEM, USER])
        await client.send([SYSTEM, USER, *result(second), {"role": "user", "content": "Go on."}])

    run(talk())
    first, second = segments_of(client)
    assert (first.relation, second.relation) == (Relation.ROOT, Relation.FORK)
    assert second.parent is not None
    offset = second.parent[1]
    assert np.array_equal(first.tokens[:offset], second.tokens[:offset])
    ((name, start, end),) = client.service.session_map.abandoned()
    assert name == first.id
    assert first.tokens[start:end].tolist() == answer_tokens("One.").tolist()
    check_recording(client.service, sampler)


def test_equal_answers_to_one_history_are_told_apart_by_their_call_ids() -> None:
    sampler = TellingSampler(replies([call_text("a.py"), call_text("a.py"), "Done."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        first = await client.send([SYSTEM, USER])
        await client.send([SYSTEM, USER])
        await client.send([SYSTEM, USER, *result(first)])

    run(talk())
    first, _ = segments_of(client)
    assert first.num_sampled_tokens == len(answer_tokens(call_text("a.py"))) + len(answer_tokens("Done."))


def test_another_system_message_or_first_message_is_a_subagent_with_its_caller_as_parent() -> None:
    sampler = TellingSampler(replies([call_text("a.py"), "Found.", "Also found.", "Done."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        first = await client.send([SYSTEM, USER])
        await client.send([{"role": "system", "content": "You search."}, USER])
        await client.send([SYSTEM, {"role": "user", "content": "Search b.py."}])
        await client.send([SYSTEM, USER, *result(first)])

    run(talk())
    main, one, two = segments_of(client)
    assert [s.relation for s in (main, one, two)] == [Relation.ROOT, Relation.SUBAGENT, Relation.SUBAGENT]
    assert [s.agent_id for s in (main, one, two)] == ["main", "agent-1", "agent-2"]
    assert one.parent is not None and one.parent[0] == main.id
    assert main.num_sampled_tokens == len(answer_tokens(call_text("a.py"))) + len(answer_tokens("Done."))
    check_recording(client.service, sampler)


def test_an_agent_that_says_its_name_rewrites_its_first_message() -> None:
    sampler = TellingSampler(replies(["One.", "Two."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        await client.send([SYSTEM, USER], agent="planner")
        await client.send([SYSTEM, {"role": "user", "content": "Summary: ..."}], agent="planner")

    run(talk())
    first, second = segments_of(client)
    assert second.relation is Relation.REWRITE and second.agent_id == first.agent_id == "planner"
    check_recording(client.service, sampler)


def test_compaction_splices_the_sampled_tokens_of_later_answers_without_training_them_again() -> None:
    sampler = TellingSampler(replies(["One .", "Two  two.", "Three."]))
    client = ChatClient(make_service(sampler))
    more = {"role": "user", "content": "Go on."}

    async def talk() -> None:
        one = result(await client.send([SYSTEM, USER]))
        two = result(await client.send([SYSTEM, USER, *one, more]))
        summary = {"role": "user", "content": "Summary: one was said."}
        await client.send([SYSTEM, USER, summary, *two, more])

    run(talk())
    first, second = segments_of(client)
    assert second.relation is Relation.REWRITE
    assert second.num_sampled_tokens == len(answer_tokens("Three."))
    assert first.num_sampled_tokens == len(answer_tokens("One .")) + len(answer_tokens("Two  two."))
    assert bytes(answer_tokens("Two  two.")) in bytes(np.ascontiguousarray(second.tokens))
    check_recording(client.service, sampler)


def test_answers_that_nobody_sampled_are_given_and_hold_no_marks_from_their_text() -> None:
    sampler = TellingSampler(replies(["Done."]))
    client = ChatClient(make_service(sampler))
    shown = {"role": "assistant", "content": "I write <|im_end|> and <tool_call>."}

    async def talk() -> None:
        await client.send([SYSTEM, USER, shown, {"role": "user", "content": "Go on."}])

    run(talk())
    (segment,) = segments_of(client)
    end = plain_renderer().end_token
    assert segment.num_sampled_tokens == len(answer_tokens("Done."))
    assert int((segment.tokens == end).sum()) == 5  # system, user, assistant, user, the sampled answer
    call = qwen_tokenizer().control_id("<tool_call>")
    assert int((segment.tokens == call).sum()) == 2, "the announcement of tools alone holds the tag"


def test_a_cut_answer_goes_on_with_an_end_token_that_is_not_sampled() -> None:
    sampler = TellingSampler(replies(["One two three four five six.", "Done."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> str:
        answer = await client.send([SYSTEM, USER], max_tokens=4)
        assert answer["choices"][0]["finish_reason"] == "length"
        await client.send([SYSTEM, USER, *result(answer), {"role": "user", "content": "Go on."}])
        return answer["choices"][0]["message"]["content"]

    words = run(talk())
    (segment,) = segments_of(client)
    assert "One two three".startswith(words.strip()[:3])
    start = int(np.flatnonzero(segment.sampled)[0])
    assert segment.sampled[start : start + 4].all() and not segment.sampled[start + 4]
    assert int(segment.tokens[start + 4]) == plain_renderer().end_token
    turn = client.service.session_map.turns()[0]
    assert (turn.start, turn.end) == (start, start + 4)
    check_recording(client.service, sampler)


@pytest.mark.parametrize("keep", [True, False])
def test_thinking_stays_or_is_dropped_before_the_users_last_words(keep: bool) -> None:
    texts = [f"{THOUGHT}I read.\n{call_text('a.py')}", f"{THOUGHT}Fixed.", "Sure."]
    sampler = TellingSampler(replies(texts))
    client = ChatClient(make_service(sampler, keep_thinking=keep))
    think = qwen_tokenizer().control_id("<think>")

    async def talk() -> None:
        history = [SYSTEM, USER]
        history += result(await client.send(history))
        history += result(await client.send(history))
        await client.send([*history, {"role": "user", "content": "Thanks."}])

    run(talk())
    segments = segments_of(client)
    check_recording(client.service, sampler)
    assert sum(s.num_sampled_tokens for s in segments) == sum(len(answer_tokens(text)) for text in texts)
    if keep:
        assert len(segments) == 1 and int((segments[0].tokens == think).sum()) == 2
        return
    first, second = segments
    assert second.relation is Relation.REWRITE
    assert int((first.tokens == think).sum()) == 2 and not (second.tokens == think).any()
    renderer = renderers().find(client.service.session_map.branches[0].entries[0].message)
    kept = renderer.encode([*renderer.grammar.split(f"I read.\n{call_text('a.py')}"), renderer.template.end])
    assert bytes(kept) in bytes(np.ascontiguousarray(second.tokens))


def test_dropped_thinking_goes_on_in_its_newest_branch() -> None:
    sampler = TellingSampler(replies([f"{THOUGHT}{n}." for n in range(4)]))
    client = ChatClient(make_service(sampler, keep_thinking=False))

    async def talk() -> None:
        history = [SYSTEM, USER]
        for number in range(4):
            history += result(await client.send(history))
            history.append({"role": "user", "content": f"more {number}"})

    run(talk())
    segments = segments_of(client)
    assert len(segments) == 4, "a segment for each of the user's turns"
    assert [s.num_sampled_tokens for s in segments] == [len(answer_tokens(f"{THOUGHT}0."))] * 4
    check_recording(client.service, sampler)


def test_another_temperature_is_another_segment() -> None:
    sampler = TellingSampler(replies(["One.", "Two."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        one = await client.send([SYSTEM, USER])
        await client.send([SYSTEM, USER, *result(one), {"role": "user", "content": "?"}], temperature=0.5)

    run(talk())
    first, second = segments_of(client)
    assert (first.sampling.temperature, second.sampling.temperature) == (1.0, 0.5)
    assert not second.sampled[: second.parent[1]].any()
    check_recording(client.service, sampler)


def test_an_answer_with_a_chunk_that_does_not_fit_leaves_nothing() -> None:
    class Misfit(TellingSampler):
        broken = True

        async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
            seen = 0
            async for chunk in super().stream(request):
                breaks = self.broken and seen > 0 and len(chunk.tokens) > 0
                yield replace(chunk, logprobs=chunk.logprobs[1:]) if breaks else chunk
                seen += len(chunk.tokens)
            self.broken = False

    sampler = Misfit(replies(["One two three.", "One two three."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        with pytest.raises(SamplerError, match="logprobs"):
            await client.send([SYSTEM, USER])
        assert client.service.session_map.num_sampled_tokens == 0
        await client.send([SYSTEM, USER])

    run(talk())
    (segment,) = segments_of(client)
    assert segment.relation is Relation.ROOT
    expected = plain_renderer().tokenizer.decode(segment.tokens)
    assert expected.count("One two three.") == 1
    assert int(segment.sampled.sum()) == len(answer_tokens("One two three."))


def test_a_failed_answer_leaves_nothing_and_the_retry_goes_on_in_place() -> None:
    sampler = TellingSampler(replies(["One two three.", "One two three."]), failures=1)
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        with pytest.raises(SamplerError, match="died"):
            await client.send([SYSTEM, USER])
        await client.send([SYSTEM, USER])

    run(talk())
    (segment,) = segments_of(client)
    assert segment.num_sampled_tokens == len(answer_tokens("One two three."))
    assert client.service.session_map.counts.failed == 1
    check_recording(client.service, sampler)


def test_a_sampler_that_lost_the_prefix_gets_everything_again() -> None:
    sampler = TellingSampler(replies(["One.", "Two."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        one = await client.send([SYSTEM, USER])
        sampler.inner.drop_prefix(client.service.session_map.branches[0].id)
        await client.send([SYSTEM, USER, *result(one), {"role": "user", "content": "?"}])

    run(talk())
    assert len(segments_of(client)) == 1
    assert sampler.inner.requests[-1].prefix_digest is None
    check_recording(client.service, sampler)


def test_known_prefixes_are_not_sent_again_and_routes_cover_every_position_but_the_last() -> None:
    sampler = TellingSampler(replies(["One.", "Two."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        one = await client.send([SYSTEM, USER])
        await client.send([SYSTEM, USER, *result(one), {"role": "user", "content": "?"}])

    run(talk())
    assert sampler.inner.requests[1].prefix_digest is not None
    (branch,) = client.service.session_map.branches
    routes = branch.recording.routes()
    assert routes is not None and (routes[:-1] != 255).all() and (routes[-1] == 255).all()


def test_a_history_without_room_is_refused_and_changes_nothing() -> None:
    client = ChatClient(make_service(TellingSampler(replies([])), limits=MapLimits(max_context_tokens=64)))
    with pytest.raises(ContextLengthError):
        run(client.send([SYSTEM, {"role": "user", "content": "x" * 400}]))
    assert not client.service.session_map.branches
    assert segments_of(client) == ()


def test_a_history_that_ends_with_an_answer_gets_another_answer() -> None:
    """As Qwen Code sends it once it has shortened a conversation that grew too long."""
    texts = [call_text("a.py"), "Done.", "And more."]
    sampler = TellingSampler(replies(texts))
    client = ChatClient(make_service(sampler))
    history = [SYSTEM, {"role": "user", "content": "<state_snapshot>"}]
    history += [{"role": "assistant", "content": "Got it. Thanks for the additional context!"}]

    async def talk() -> None:
        history.extend(result(await client.send(history)))
        history.extend(result(await client.send(history)))
        await client.send(history)

    run(talk())
    check_recording(client.service, sampler)
    (branch,) = client.service.session_map.branches
    words = qwen_tokenizer().decode(branch.recording.tokens)
    asked = "context!<|im_end|>\n<|im_start|>assistant\n<tool_call>"
    assert asked in words and words.endswith("Done.<|im_end|>\n<|im_start|>assistant\nAnd more.<|im_end|>")
    assert branch.recording.sampled.sum() == sum(len(answer_tokens(text)) for text in texts)


def test_what_was_sampled_after_the_end_of_an_answer_is_no_part_of_it() -> None:
    texts = [f"{call_text('a.py')}\n{call_text('b.py')} and more", "Done."]
    sampler = TellingSampler(replies(texts), chunk_tokens=0)
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        one = await client.send([SYSTEM, USER], parallel_tool_calls=False)
        await client.send([SYSTEM, USER, *result(one)])

    run(talk())
    (segment,) = segments_of(client)
    start = int(np.flatnonzero(segment.sampled)[0])
    expected = answer_tokens(call_text("a.py"), ended=False)
    assert segment.tokens[start : start + len(expected)].tolist() == expected.tolist()
    assert segment.num_sampled_tokens == len(expected) + len(answer_tokens("Done."))
    assert int(segment.tokens[start + len(expected)]) == plain_renderer().end_token
    assert sampler.inner.requests[1].prefix_digest is None, "the sampler holds other tokens"
    (branch,) = client.service.session_map.branches
    routes = branch.recording.routes()
    assert routes is not None and (routes[:-1] != 255).all()
    check_recording(client.service, sampler)


def test_results_come_in_the_order_of_their_calls() -> None:
    sampler = TellingSampler(replies([f"{call_text('a.py')}\n{call_text('b.py')}", "Done."]))
    client = ChatClient(make_service(sampler))

    async def talk() -> None:
        message, one, two = result(await client.send([SYSTEM, USER]))
        one["content"], two["content"] = "A", "B"
        await client.send([SYSTEM, USER, message, two, one])

    run(talk())
    assert [r.output for r in client.service.session_map.turns()[0].results] == ["A", "B"]
