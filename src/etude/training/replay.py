"""Router replay over one RL step: which routes a forward pass replays.

r3    replays the routes that the engine recorded for each segment, in the segment's update
r2    replays the routes of the trainer's own forward pass at the step's start
      (in the first update these are the router's own choice, so nothing is recorded)
off   the router chooses
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from etude.config import RlConfig
from etude.model import LanguageModel, ReplayedRoutes
from etude.model.scoring import PackedSequences, device_of, packed_logprobs
from etude.training.batches import TrainingSequence


def replayed_routes(
    sequences: Sequence[TrainingSequence], batch: PackedSequences, targets: Tensor, min_share: float
) -> ReplayedRoutes | None:
    """The sequences' routes as ReplayedRoutes for one forward pass; None if any has none."""
    routes = [sequence.routes for sequence in sequences if sequence.routes is not None]
    if len(routes) != len(sequences):
        return None
    return ReplayedRoutes(batch.pack_rows(routes), targets - 1, min_share)


@torch.no_grad()
def with_old_policy(
    model: LanguageModel, sequences: Sequence[TrainingSequence], config: RlConfig
) -> list[TrainingSequence]:
    """The sequences, of one micro-batch and in the order given, with their log-probabilities under the
    current weights as `proximal`, and for `r2` with the current routes."""
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
    recorded = batch.unpack(recorder.pop_routes(len(batch.tokens), targets - 1).cpu().numpy())
    return [replace(s, proximal=p, routes=r) for s, p, r in zip(sequences, proximal, recorded, strict=True)]
