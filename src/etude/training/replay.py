"""Router replay over one RL step: which routes a forward pass replays, and that each record is used once.

r3    the engine's record of each segment        replayed in the segment's update
r2    the trainer's own forward pass over it at the step's start, likewise
      (in the first update the router's own choice is that, and nothing need be recorded)
off   the router chooses
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from etude.config import RlConfig
from etude.errors import RouteReplayError
from etude.model import LanguageModel, ReplayedRoutes
from etude.model.scoring import PackedSequences, device_of, packed_logprobs
from etude.training.batches import TrainingSequence


class RouteLedger:
    """Keeps book of one step: every segment that is trained on is consumed by exactly one micro-batch."""

    def __init__(self, segment_ids: Iterable[str]) -> None:
        self._waiting = set(segment_ids)

    def consume(self, segment_id: str) -> None:
        """Marks a segment as trained on. Raises RouteReplayError if it is not waiting to be."""
        if segment_id not in self._waiting:
            raise RouteReplayError("was consumed already in this step", field="segment", received=segment_id)
        self._waiting.remove(segment_id)

    def close(self) -> None:
        """Raises RouteReplayError if anything was left over."""
        if self._waiting:
            raise RouteReplayError(
                f"{len(self._waiting)} segments of the step were never trained on",
                field="segment",
                received=sorted(self._waiting)[:4],
            )


def replayed_routes(
    sequences: Sequence[TrainingSequence], batch: PackedSequences, targets: Tensor, min_share: float
) -> ReplayedRoutes | None:
    """What the sequences' routes say, for one forward pass; None where they have none."""
    routes = [sequence.routes for sequence in sequences if sequence.routes is not None]
    if len(routes) != len(sequences):
        return None
    return ReplayedRoutes(batch.pack_rows(routes), targets - 1, min_share)


@torch.no_grad()
def with_old_policy(
    model: LanguageModel, sequences: Sequence[TrainingSequence], config: RlConfig
) -> list[TrainingSequence]:
    """The sequences, which fit one micro-batch, with what the present weights make of them.

    That is their log-probabilities, and for `r2` their routes; in the order given.
    """
    batch = PackedSequences.pack([sequence.tokens for sequence in sequences], device_of(model))
    targets = batch.pack_rows([s.sampled for s in sequences]).nonzero().flatten()
    recorder = None
    if config.router_replay == "r2" and model.num_experts:
        recorder = model.recorder()
    routes = recorder or replayed_routes(sequences, batch, targets, config.replay_min_share)
    logprobs, _ = packed_logprobs(model, batch, targets, temperature=config.temperature, routes=routes)
    rows = logprobs.new_zeros(len(batch.tokens)).index_copy(0, targets, logprobs)
    proximal = batch.unpack(rows.float().cpu().numpy())
    if recorder is None:
        return [replace(s, proximal=p) for s, p in zip(sequences, proximal, strict=True)]
    recorded = batch.unpack(recorder.take(len(batch.tokens), targets - 1).cpu().numpy())
    return [replace(s, proximal=p, routes=r) for s, p, r in zip(sequences, proximal, recorded, strict=True)]
