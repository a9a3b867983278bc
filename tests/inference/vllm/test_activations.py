"""The weights of each token, derived from its request's progress at each exchange."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import SamplerError
from etude.inference.vllm.activations import History, check_spans
from etude.inference.vllm.answers import Span
from etude.records import PolicyVersion
from tests.inference.vllm.builders import asynchronous


def history_of(progress: list[int], kv: list[str] | None = None) -> History:
    """The first version, and one more for each number of positions that request `r` had computed."""
    history = History()
    for step, computed in enumerate([0, *progress]):
        activation = history.create(PolicyVersion("run", step), (kv or ["keep"] * 99)[step])  # type: ignore[arg-type]
        activation.progress["r"] = computed
        activation.verdict.set_result(True)
        history.record(activation)
    return history


@asynchronous
async def test_spans_cover_all_tokens_and_change_where_the_weights_did() -> None:
    @given(
        prompt=st.integers(1, 20),
        sampled=st.integers(1, 30),
        progress=st.lists(st.integers(0, 60), max_size=4).map(sorted),
    )
    def holds(prompt: int, sampled: int, progress: list[int]) -> None:
        spans = history_of(progress).spans("r", prompt, 1, sampled)
        assert (spans[0].start, spans[-1].end) == (0, sampled)
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))
        for span, computed in zip(spans[1:], progress, strict=True):
            # Token i is sampled as position prompt - 1 + i is computed.
            assert span.start == min(max(computed - prompt + 1, 0), sampled)

    holds()


@asynchronous
async def test_the_oldest_keys_are_those_of_the_session_s_begin_or_of_the_last_recompute() -> None:
    history = history_of([5, 9, 12], ["keep", "keep", "recompute", "keep"])
    last = await history.verified(history.label_at(3))
    assert history.oldest(0, last).step == 2
    assert history.oldest(3, last).step == 3
    first = await history.verified(history.label_at(1))
    assert history.oldest(0, first).step == 0


@asynchronous
async def test_what_a_server_that_is_gone_sampled_is_refused() -> None:
    history = History()
    activation = history.create(PolicyVersion("run", 0), "keep")
    history.refuse_pending()
    with pytest.raises(SamplerError, match="rejected"):
        await history.verified(activation.label)
    with pytest.raises(SamplerError, match="from unknown weights"):
        await history.verified("other")


def test_vllm_may_name_a_version_late_but_never_early_nor_another() -> None:
    ours = [Span("a", 0, 4), Span("b", 4, 9)]
    check_spans(ours, (Span("a", 0, 6), Span("b", 6, 9)))
    check_spans(ours, (Span("a", 0, 9),))
    for theirs in ((Span("a", 0, 3), Span("b", 3, 9)), (Span("c", 0, 9),)):
        with pytest.raises(SamplerError, match="other weights"):
            check_spans(ours, theirs)
