"""The history of weight activations in vLLM, and the policy versions that follow for a request's tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from etude.errors import SamplerError
from etude.inference.vllm.answers import Span
from etude.protocols import KvPolicy
from etude.records import PolicyVersion


@dataclass(slots=True, eq=False)
class Activation:
    """One activation of a version."""

    label: str
    version: PolicyVersion
    kv: KvPolicy
    verdict: asyncio.Future[bool]
    """True: the probe agreed. False: tokens with this label must not be used."""
    progress: dict[str, int] = field(default_factory=dict[str, int])
    """Positions of each request computed before this activation, as the worker counted them at the swap."""


class History:
    """Activations in order. Tokens of one are delivered only once its verdict is True."""

    def __init__(self) -> None:
        self._named: dict[str, Activation] = {}
        self._order: list[Activation] = []

    def __len__(self) -> int:
        return len(self._order)

    @property
    def last(self) -> Activation:
        """The newest recorded activation."""
        return self._order[-1]

    def create(self, version: PolicyVersion, kv: KvPolicy) -> Activation:
        """Creates an activation with a unique label; `record` adds it once it has taken place."""
        label = f"{version}:{version.digest[:16]}#{len(self._named)}"
        activation = Activation(label, version, kv, asyncio.get_running_loop().create_future())
        self._named[label] = activation
        return activation

    def record(self, activation: Activation) -> None:
        """Records that an activation has taken place. Idempotent."""
        if activation not in self._order:
            self._order.append(activation)

    def refuse_pending(self) -> None:
        """Sets the verdict of all unverified activations to False, because their server has ended."""
        for activation in self._named.values():
            if not activation.verdict.done():
                activation.verdict.set_result(False)

    async def verified(self, label: str) -> Activation:
        """Waits for the verdict on a label; its activation. Raises SamplerError if the probe disagreed."""
        activation = self._named.get(label)
        if activation is None:
            raise SamplerError("vLLM sampled from unknown weights", received=label)
        if not await asyncio.shield(activation.verdict):
            raise SamplerError("sampled from weights that were rejected", received=label, fix="sample again")
        return activation

    def label_at(self, place: int) -> str:
        """The label of the activation at index `place`; empty before the first."""
        return self._order[place].label if self._order else ""

    def spans(self, request: str, num_prompt: int, began: int, num_sampled: int) -> list[Span]:
        """The spans of a request's sampled tokens by label.

        `began`: number of activations when it was sent. The token after position p is sampled when p is
        computed, so a request with c computed positions has sampled c - num_prompt + 1 tokens.
        """
        label, start, spans = self._order[began - 1].label, 0, list[Span]()
        for activation in self._order[began:]:
            computed = activation.progress.get(request, 0)
            at = min(max(computed - num_prompt + 1, start), num_sampled)
            spans.append(Span(label, start, at))
            label, start = activation.label, at
        return [*spans, Span(label, start, num_sampled)]

    def remove_request(self, request: str, began: int) -> None:
        """Removes a request that has ended. `began`: as in `spans`."""
        for activation in self._order[began:]:
            activation.progress.pop(request, None)

    def oldest(self, since: int, activation: Activation) -> PolicyVersion:
        """The oldest version whose keys a token of `activation` attended to, in a session that began at index
        `since`: the version of that time, or of the last activation that recomputed all keys."""
        until = self._order.index(activation)
        for place in range(until, since, -1):
            if self._order[place].kv == "recompute":
                return self._order[place].version
        return self._order[min(since, until)].version


def check_spans(ours: list[Span], theirs: tuple[Span, ...]) -> None:
    """Compares our spans with those that vLLM reports, whose labels change with or after the weights.

    Raises SamplerError if vLLM reports a label before its activation, or an unknown one.
    """
    starts = {span.label: span.start for span in ours}
    for span in theirs:
        if span.label not in starts or span.start < starts[span.label]:
            raise SamplerError("vLLM reports other weights than its worker had", received=theirs)
