"""Prints trajectories: sessions turn by turn, tokens, and differences between two of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from etude.cli.output import print_diff, shown
from etude.records import Relation, Segment, Trajectory, Turn

if TYPE_CHECKING:
    from etude.store.comparison import Comparison, Divergence
    from etude.tokens.tokenizer import Tokenizer

_AROUND = 4
"""Number of tokens shown on each side of the first different one."""


class SessionPrinter:
    """Prints sessions of one trajectory; with a `tokenizer`, also tokens as text."""

    def __init__(self, console: Console, trajectory: Trajectory, tokenizer: Tokenizer | None) -> None:
        self._console = console
        self._trajectory = trajectory
        self._tokenizer = tokenizer
        self._places = {segment.id: at for at, segment in enumerate(trajectory.segments)}
        self._summaries = summary_ends(trajectory)

    def header(self) -> None:
        """Prints id, status and reward of the session."""
        trajectory, reward = self._trajectory, self._trajectory.reward
        nonzero = {name: value for name, value in reward.terms.items() if value} if reward else {}
        terms = "".join(f"  {name} {value:+.2f}" for name, value in nonzero.items())
        cause = f" ({trajectory.cause})" if trajectory.cause else ""
        total = (
            "not graded" if reward is None else f"reward {reward.total:.2f}  task {reward.task:.2f}{terms}"
        )
        tokens = f"{trajectory.num_sampled_tokens} sampled tokens"
        self._console.print(Text(str(trajectory.id), style="bold"))
        version = trajectory.oldest_version or ""
        self._console.print(shown(f"{trajectory.status}{cause}  {total}  {tokens}  {version}"))

    def session(self, only: int | None, tokens: bool) -> None:
        """Prints the turns, or only turn `only`, counted from 1; with contexts if there are several."""
        before: str | None = None
        ends: dict[str, int] = {}
        for number, turn in enumerate(self._trajectory.turns, 1):
            if only in (None, number):
                if turn.segment_id != before and len(self._trajectory.segments) > 1:
                    self._context(turn.segment_id)
                before = turn.segment_id
                self._turn(number, turn, ends.get(turn.segment_id, 0) if tokens else None)
            ends[turn.segment_id] = turn.end

    def _context(self, segment_id: str) -> None:
        place = self._places.get(segment_id)
        if place is None:
            return
        segment = self._trajectory.segments[place]
        head = f"context {place + 1} of {len(self._places)}  {self._origin(segment)}"
        self._console.print()
        self._console.print(shown(f"{head}  {len(segment.tokens)} tokens", "bold magenta"))
        if self._tokenizer is not None:
            opening = [span for span in segment.turn_spans if span.role in ("system", "user")][:2]
            for span in opening:
                words = self._tokenizer.decode(segment.tokens[span.start : span.end], skip_control=True)
                self._console.print(shown(words, "italic"))

    def _origin(self, segment: Segment) -> str:
        if segment.parent is None:
            return str(segment.relation)
        name, offset = segment.parent
        place = self._places.get(name)
        parent = name if place is None else f"context {place + 1}"
        who = f" {segment.agent_id}" if segment.relation is Relation.SUBAGENT else ""
        return f"{segment.relation}{who} of {parent} at token {offset}"

    def _turn(self, number: int, turn: Turn, tokens_from: int | None) -> None:
        summary = "  summary" if (turn.segment_id, turn.end) in self._summaries and not turn.calls else ""
        self._console.print()
        self._console.print(Text(f"turn {number}{summary}", style="bold cyan"))
        self._console.print(shown(turn.text))
        place = self._places.get(turn.segment_id)
        if tokens_from is not None and place is not None:
            self._tokens(self._trajectory.segments[place], tokens_from, turn.end)
        for result in turn.results:
            self._console.print(shown(result.output or "(empty)", "red" if result.error else "dim"))

    def _tokens(self, segment: Segment, start: int, end: int) -> None:
        """Prints one line per token: position, id, log-probability if it was sampled, text."""
        for at in range(start, end):
            token, sampled = int(segment.tokens[at]), bool(segment.sampled[at])
            logprob = f"{float(segment.logprobs[at]):9.4f}" if sampled else " " * 9
            text = "" if self._tokenizer is None else repr(self._tokenizer.decode([token]))
            line = f"  {at:6d} {token:7d} {logprob}  {text}"
            self._console.print(shown(line, "" if sampled else "dim"), soft_wrap=True)


def summary_ends(trajectory: Trajectory) -> set[tuple[str, int]]:
    """(segment, offset) at which a context of the trajectory was summarised."""
    return {
        segment.parent
        for segment in trajectory.segments
        if segment.parent is not None and segment.relation is Relation.SUMMARY
    }


def session_document(trajectory: Trajectory) -> dict[str, Any]:
    """A session with its tokens, as plain JSON values."""
    from etude.store.documents import trajectory_document

    names = ("tokens", "sampled", "logprobs")
    arrays = [{name: getattr(segment, name).tolist() for name in names} for segment in trajectory.segments]
    return {**trajectory_document(trajectory), "id": str(trajectory.id), "arrays": arrays}


def turn_document(trajectory: Trajectory, number: int) -> dict[str, Any]:
    """One turn, from 1, with its context and tokens, as plain JSON values."""
    from etude.store.documents import trajectory_document

    turn = trajectory.turns[number - 1]
    document: dict[str, Any] = {
        "id": str(trajectory.id),
        "turn": number,
        "summary": (turn.segment_id, turn.end) in summary_ends(trajectory) and not turn.calls,
        **trajectory_document(trajectory)["turns"][number - 1],
    }
    segment = next((s for s in trajectory.segments if s.id == turn.segment_id), None)
    if segment is not None:
        place = slice(turn.start, turn.end)
        document |= {
            "relation": str(segment.relation),
            "parent": list(segment.parent) if segment.parent else None,
            "prompt_tokens": segment.tokens[: turn.start].tolist(),
            "tokens": segment.tokens[place].tolist(),
            "logprobs": segment.logprobs[place].tolist(),
        }
    return document


def print_comparison(
    console: Console,
    sides: tuple[Trajectory, Trajectory],
    compared: Comparison,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None],
) -> None:
    """Prints how many turns two sessions have in common, and where they diverge, in colour."""
    left, right = sides
    console.print(shown(f"--- {left.id}", "bold red"), soft_wrap=True)
    console.print(shown(f"+++ {right.id}", "bold green"), soft_wrap=True)
    parted = compared.divergence
    if compared.equal:
        console.print(Text(f"the same: {compared.common_turns} turns"))
        return
    console.print(Text(f"turns that are the same: {compared.common_turns}"))
    if parted is not None:
        console.print(Text(f"turn {parted.turn} differs: {', '.join(parted.aspects)}", style="bold cyan"))
        if parted.token is not None:
            _print_tokens(console, sides, parted, tokenizers)
        print_diff(console, _turn_lines(parted.left, parted.right))
    for name, (one, other) in compared.outcome.items():
        print_diff(console, (f"-{name}: {one}", f"+{name}: {other}"))


def comparison_document(left: Trajectory, right: Trajectory, compared: Comparison) -> dict[str, Any]:
    """The comparison as plain JSON values."""
    parted = compared.divergence
    document: dict[str, Any] = {
        "left": str(left.id),
        "right": str(right.id),
        "equal": compared.equal,
        "common_turns": compared.common_turns,
        "outcome": {name: list(pair) for name, pair in compared.outcome.items()},
        "divergence": None,
    }
    if parted is not None:
        document["divergence"] = {
            "turn": parted.turn,
            "aspects": list(parted.aspects),
            "call": parted.call,
            "token": parted.token,
            "diff": list(_turn_lines(parted.left, parted.right)),
        }
    return document


def _print_tokens(
    console: Console,
    sides: tuple[Trajectory, Trajectory],
    parted: Divergence,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None],
) -> None:
    assert parted.token is not None
    console.print(Text(f"tokens differ from position {parted.token} of the context on"))
    turns = (parted.left, parted.right)
    for mark, trajectory, turn, tokenizer in zip("-+", sides, turns, tokenizers, strict=True):
        segment = next((s for s in trajectory.segments if turn and s.id == turn.segment_id), None)
        if segment is None or turn is None:
            continue
        window = segment.tokens[max(0, parted.token - _AROUND) : min(parted.token + _AROUND, turn.end)]
        text = "" if tokenizer is None else f"  {tokenizer.decode(window)!r}"
        print_diff(console, [f"{mark}{window.tolist()}{text}"])


def _turn_lines(left: Turn | None, right: Turn | None) -> Iterator[str]:
    """Yields the unified diff of two messages, and of the results of each of their calls."""
    yield from _diff("message", left.text if left else None, right.text if right else None)
    turns = [turn for turn in (left, right) if turn]
    for at in range(max((len(turn.calls) for turn in turns), default=0)):
        answers = [_answer_at(turn, at) for turn in (left, right)]
        if answers[0] != answers[1]:
            name = next(turn.calls[at].name for turn in turns if at < len(turn.calls))
            yield from _diff(f"result of call {at + 1}, {name or 'malformed'}", *answers)


def _diff(title: str, left: str | None, right: str | None) -> Iterator[str]:
    if left == right:
        return
    yield f"@@ {title} @@"
    lines = difflib.unified_diff((left or "").split("\n"), (right or "").split("\n"), lineterm="", n=2)
    yield from list(lines)[2:]
    for mark, text in (("-", left), ("+", right)):
        if text is None:
            yield f"{mark}[nothing]"


def _answer_at(turn: Turn | None, at: int) -> str | None:
    if turn is None or at >= len(turn.results):
        return None
    result = turn.results[at]
    marks = [f"[error: {result.error}]"] if result.error else []
    return "\n".join([result.output, *marks, *(["[finished]"] if result.finished else [])])
