"""Builds the observation after an agent's message: tool results, user text, a request for a summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from etude.agent.budget import Budget
from etude.agent.summary import shorten_texts
from etude.tokens.renderer import Renderer

Render = Callable[[Sequence[str], str | None], NDArray[np.int32]]
"""(outputs, user text) -> tokens."""


def observe(
    render: Render, outputs: Sequence[str], user_text: str | None, budget: Budget, length: int
) -> tuple[NDArray[np.int32], bool] | None:
    """(tokens, whether they ask for a summary) of tool outputs, then the user's text, as an observation after
    `length` tokens of the context.

    Asks for a summary if it fills the context. If it would leave no room for a message: None without
    summaries; with them, the longest outputs are cut in their middle, and None only if that is not enough.
    """
    room = budget.context_tokens - length

    def fits(texts: Sequence[str]) -> bool:
        return len(render(texts, user_text)) < room

    shown: Sequence[str] | None = outputs
    if not fits(outputs):
        shown = shorten_texts(outputs, fits) if budget.may_summarise else None
    if shown is None:
        return None
    tokens = render(shown, user_text)
    full = budget.may_summarise and (shown is not outputs or length + len(tokens) >= budget.trigger)
    if full and budget.summary is not None:
        request = budget.summary.request
        tokens = render(shown, request if user_text is None else f"{user_text}\n\n{request}")
    return tokens, full


def follow(
    renderer: Renderer,
    before: NDArray[np.int32],
    calls: Sequence[str],
    outputs: Sequence[str],
    user_text: str | None,
) -> NDArray[np.int32]:
    """Renders the results of `calls`, then the user's text, as they follow the tokens `before`."""
    if user_text is None:
        return renderer.follow(before, renderer.observations(outputs, calls))
    parts = [renderer.results(outputs, calls)] if outputs else []
    return renderer.follow(before, np.concatenate([*parts, renderer.user_message(user_text)]))
