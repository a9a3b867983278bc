"""Which weights vLLM had when: activations in their order, and what follows for the tokens of a request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from etude.errors import SamplerError
from etude.inference.vllm.answers import Span
from etude.protocols import KvPolicy
from etude.records import PolicyVersion


@dataclass(slots=True, eq=False)
class Activation:
    """One time that a version was brought in."""

    label: str
    version: PolicyVersion
    kv: KvPolicy
    verdict: asyncio.Future[bool]
    """True: the probe agreed. False: nothing of this label may be used."""
    progress: dict[str, int] = field(default_factory=dict[str, int])
    """Positions of each request that were computed with the weights before, as the worker counted them when
    it exchanged the weights."""


class History:
    """Activations in their order. Tokens of one are handed out only once its verdict is True."""

    def __init__(self) -> None:
        self._named: dict[str, Activation] = {}
        self._order: list[Activation] = []

    def __len__(self) -> int:
        return len(self._order)

    @property
    def last(self) -> Activation:
        """The newest one that took place."""
        return self._order[-1]

    def create(self, version: PolicyVersion, kv: KvPolicy) -> Activation:
        """A new activation, which has not taken place yet."""
        label = f"{version}:{version.digest[:16]}#{len(self._named)}"
        activation = Activation(label, version, kv, asyncio.get_running_loop().create_future())
        self._named[label] = activation
        return activation

    def record(self, activation: Activation) -> None:
        """It took place."""
        if activation not in self._order:
            self._order.append(activation)

    def refuse_pending(self) -> None:
        """Whatever has no verdict yet is refused: its server is gone."""
        for activation in self._named.values():
            if not activation.verdict.done():
                activation.verdict.set_result(False)

    async def verified(self, label: str) -> Activation:
        """The activation behind a label, once the probe agreed. Raises SamplerError if it did not."""
        activation = self._named.get(label)
        if activation is None:
            raise SamplerError("vLLM samples from weights that nobody named", received=label)
        if not await asyncio.shield(activation.verdict):
            raise SamplerError("sampled from weights that were refused", received=label, fix="sample again")
        return activation

    def label_at(self, place: int) -> str:
        """The label in force after so many activations; empty before the first."""
        return self._order[place].label if self._order else ""

    def spans(self, request: str, num_prompt: int, began: int, num_sampled: int) -> list[Span]:
        """Where the sampled tokens of a request came from.

        `began`: activations that had taken place when it was sent. The token after position p is sampled
        when p is computed, so one that had c positions computed had sampled c - num_prompt + 1 tokens.
        """
        label, start, spans = self._order[began - 1].label, 0, list[Span]()
        for activation in self._order[began:]:
            computed = activation.progress.get(request, 0)
            at = min(max(computed - num_prompt + 1, start), num_sampled)
            spans.append(Span(label, start, at))
            label, start = activation.label, at
        return [*spans, Span(label, start, num_sampled)]

    def remove_request(self, request: str, began: int) -> None:
        """The request has ended. `began`: as in `spans`."""
        for activation in self._order[began:]:
            activation.progress.pop(request, None)

    def oldest(self, since: int, activation: Activation) -> PolicyVersion:
        """The oldest version whose keys a token of `activation` saw, in a session that began at place
        `since`: the one then in force, or the last after which all keys were computed again."""
        until = self._order.index(activation)
        for place in range(until, since, -1):
            if self._order[place].kv == "recompute":
                return self._order[place].version
        return self._order[min(since, until)].version


def check_spans(ours: list[Span], theirs: tuple[Span, ...]) -> None:
    """Compares with vLLM's own account of a request, which changes labels with or after the weights.

    Raises SamplerError where vLLM names a label earlier than the weights came, or one that they never had.
    """
    starts = {span.label: span.start for span in ours}
    for span in theirs:
        if span.label not in starts or span.start < starts[span.label]:
            raise SamplerError("vLLM names other weights for tokens than its worker had", received=theirs)
