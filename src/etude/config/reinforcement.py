"""Reinforcement learning: the loss, the reward, the stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section
from etude.config.optimizer import OptimizerConfig


class LossConfig(Section):
    """The policy-gradient loss."""

    kind: Literal["cispo", "clip"] = "cispo"
    """`cispo`: the importance ratio, capped and detached, weights log p. `clip`: clipped surrogate."""
    cispo_cap: float = Field(default=5.0, gt=1)
    """Largest importance ratio of `cispo`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """`clip`: lowest ratio is 1 - this."""
    clip_high: float = Field(default=0.28, gt=0)
    """`clip`: highest ratio is 1 + this."""
    normalizer: Literal["tokens", "constant", "sequences"] = "tokens"
    """What the summed loss is divided by: trained tokens, group size times `constant_tokens`, sequences."""
    constant_tokens: int = Field(default=256, ge=1)
    """Tokens that a trajectory counts for under `constant`."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of the k3 penalty against the policy that RL began with."""
    balance_weight: float = Field(default=0.0, ge=0)
    """Weight of the router's load-balancing loss."""


class RewardConfig(Section):
    """What a trajectory earns."""

    malformed_penalty: float = Field(default=0.05, ge=0)
    """Taken off for each malformed call."""
    malformed_at_most: int = Field(default=4, ge=0)
    """Malformed calls that are penalised per trajectory."""
    limit_penalty: float = Field(default=0.1, ge=0)
    """Taken off for running into a limit instead of finishing."""


class RlConfig(Section):
    """Reinforcement learning."""

    num_steps: int = Field(default=100, ge=0)
    """RL steps; each publishes one policy version."""
    groups_per_step: int = Field(default=12, ge=1)
    """Groups (tasks) that one step trains on."""
    group_size: int = Field(default=8, ge=2)
    """Trajectories per group."""
    updates_per_step: int = Field(default=2, ge=1)
    """Optimiser updates per step, each on its share of the groups."""
    refill_below: float = Field(default=0.67, ge=0, le=1)
    """Groups without variance are replaced in another round where less than this share of
    `groups_per_step` is left: a round lasts as long as its longest session, however few groups it has."""
    max_refill_rounds: int = Field(default=2, ge=0)
    """How often groups without variance are replaced by new ones before the step goes on without."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of rollouts."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation (GRPO) instead of not (Dr.GRPO)."""
    router_replay: bool = True
    """Train with the experts that the engine recorded."""
    level_weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """How often tasks of each level are drawn."""
    train_summaries: bool = True
    """Whether the tokens of the agent's summaries are trained on; not to is a control."""
    algorithm: Literal["policy_gradient", "rejection_sampling"] = "policy_gradient"
    """`rejection_sampling` fine-tunes on solved trajectories only: a control."""
    loss: LossConfig = LossConfig()
    """The loss."""
    reward: RewardConfig = RewardConfig()
    """The reward."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser of this stage."""

    @model_validator(mode="after")
    def _fits_together(self) -> RlConfig:
        if self.updates_per_step > self.groups_per_step:
            raise ValueError(
                f"updates_per_step: must be at most groups_per_step={self.groups_per_step}, "
                f"received {self.updates_per_step}"
            )
        if min(self.level_weights) < 0 or sum(self.level_weights) <= 0:
            raise ValueError(
                f"level_weights: must be >= 0 and not all 0, received {list(self.level_weights)}"
            )
        return self
