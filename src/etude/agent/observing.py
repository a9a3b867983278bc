"""What follows a message of the agent's: answers of tools, words of the user, the wish for a summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.agent.budget import Budget
from etude.agent.summary import shorten_texts
from etude.tokens.renderer import Renderer


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Tokens [T] up to where the agent's next message begins."""

    tokens: NDArray[np.int32]
    asks_for_summary: bool


Render = Callable[[Sequence[str], str | None], NDArray[np.int32]]
"""Outputs and words of the user as tokens."""


def observe(
    render: Render, outputs: Sequence[str], words: str | None, budget: Budget, length: int
) -> Observation | None:
    """What the tools answered and the user said, after `length` tokens of the context.

    A summary is asked for if the context is full with it. Where no room is left for a message: None without
    summaries; with them, answers that are longer than the room are cut in their middle, and None only if that
    does not help.
    """
    room = budget.context_tokens - length

    def fits(texts: Sequence[str]) -> bool:
        return len(render(texts, words)) < room

    shown: Sequence[str] | None = outputs
    if not fits(outputs):
        shown = shorten_texts(outputs, fits) if budget.may_summarise else None
    if shown is None:
        return None
    tokens = render(shown, words)
    full = budget.may_summarise and (shown is not outputs or length + len(tokens) >= budget.trigger)
    if full and budget.summary is not None:
        request = budget.summary.request
        tokens = render(shown, request if words is None else f"{words}\n\n{request}")
    return Observation(tokens, full)


def follow(
    renderer: Renderer,
    before: NDArray[np.int32],
    calls: Sequence[str],
    outputs: Sequence[str],
    words: str | None,
) -> NDArray[np.int32]:
    """The answers to these `calls`, then the user's words, as they stand behind the tokens `before`."""
    if words is None:
        return renderer.follow(before, renderer.observations(outputs, calls))
    parts = [renderer.results(outputs, calls)] if outputs else []
    return renderer.follow(before, np.concatenate([*parts, renderer.user_message(words)]))
