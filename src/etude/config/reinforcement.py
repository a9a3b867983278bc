"""Reinforcement learning: the loss, its corrections, router replay, the reward, the stage."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from etude.config.adapter import AdapterConfig
from etude.config.base import Section
from etude.config.forks import ForkConfig
from etude.config.optimizer import OptimizerConfig
from etude.config.reward import RewardConfig

Baseline = Literal["group_mean", "group_mean_std", "leave_one_out"]
Normalizer = Literal["group_constant", "tokens", "sequences"]
RouterReplay = Literal["r3", "r2", "off"]
Stale = Literal["drop", "mask"]
Stragglers = Literal["abort", "carry"]

_RENAMED = {
    "normalize_std": ("baseline", {False: "group_mean", True: "group_mean_std"}),
    "router_replay": ("router_replay", {False: "off", True: "r3"}),
}
"""Keys of runs that were begun before these had names; their directories are still read."""


class CorrectionConfig(Section):
    """Corrections against the log-probabilities that the engine sampled with. All off by default.

    Each compares the trainer's policy at the step's start with the sampled one; with any of them on, the loss
    bounds the step from there. A bound of 0 is off.
    """

    tis_cap: float = Field(default=0.0, ge=0)
    """Truncated importance sampling: a token's loss times min(ratio, this). Usual: 2."""
    token_low: float = Field(default=0.0, ge=0, lt=1)
    """Tokens whose ratio is below this are masked (IcePop). Usual: 0.5."""
    token_high: float = Field(default=0.0, ge=0)
    """Tokens whose ratio is above this are masked (IcePop). Usual: 5."""
    sequence_low: float = Field(default=0.0, ge=0, lt=1)
    """Sequences are masked whose ratio, as a geometric mean over their tokens, is below this. Usual: 0.99."""
    sequence_high: float = Field(default=0.0, ge=0)
    """Sequences are masked whose geometric mean ratio is above this. Usual: 1.01."""

    @property
    def enabled(self) -> bool:
        """Whether any correction is on."""
        return any(value > 0 for value in self.model_dump().values())

    @model_validator(mode="after")
    def _bounds_hold_one(self) -> CorrectionConfig:
        for name in ("token_high", "sequence_high"):
            if 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be 0 (off) or above 1, received {getattr(self, name)}")
        return self


class LossConfig(Section):
    """The policy-gradient loss."""

    kind: Literal["clip", "cispo", "gspo", "decoupled"] = "clip"
    """`clip`: clipped surrogate. `cispo`: the importance ratio, capped and detached, weights log p. `gspo`:
    clipped surrogate of one ratio per sequence. `decoupled`: clipped against the trainer's policy at the
    step's start, weighted by that over the policy that sampled."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """`clip`, `decoupled`: lowest ratio is 1 - this."""
    clip_high: float = Field(default=0.28, gt=0)
    """`clip`, `decoupled`: highest ratio is 1 + this."""
    cispo_cap: float = Field(default=5.0, gt=1)
    """Largest importance ratio of `cispo`."""
    gspo_clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """`gspo`: lowest ratio of a sequence is 1 - this."""
    gspo_clip_high: float = Field(default=4e-4, gt=0)
    """`gspo`: highest ratio of a sequence is 1 + this."""
    normalizer: Normalizer = "group_constant"
    """What the summed loss is divided by. `group_constant`: trajectories of the group times
    `constant_tokens`, then the mean over groups. `tokens`: trained tokens of the update. `sequences`: own
    tokens, then the mean over trajectories. A trajectory of many segments weighs what one sequence of its
    tokens would."""
    constant_tokens: int = Field(default=256, ge=1)
    """Tokens that a trajectory counts for under `group_constant`."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """How the divergence from the policy that RL began with is paid for: `k1` off the advantage, detached;
    `k2` or `k3` in the loss."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of that divergence; 0: none, and no reference is kept."""
    balance_weight: float = Field(default=0.0, ge=0)
    """Weight of the router's load-balancing loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Corrections against the sampled log-probabilities."""

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss asks for the trainer's own log-probabilities at the step's start."""
        return self.kind == "decoupled" or self.correction.enabled


class FeedbackConfig(Section):
    """Textual feedback: at a faulty turn the policy that is told what is wrong teaches the one that is
    not."""

    weight: float = Field(default=0.0, ge=0)
    """Weight of the mean divergence per token; 0: off."""
    max_hints_per_trajectory: int = Field(default=2, ge=1)
    """Faulty turns of one trajectory that are taught, the first ones."""


class StreamConfig(Section):
    """Training on trajectories that were recorded earlier, in the order of their storage."""

    source: str = ""
    """A run directory or a trajectory log to train on instead of sampling; empty: sample."""
    min_step: int = Field(default=0, ge=0)
    """Only groups whose oldest policy version is of this step or later."""
    max_step: int | None = Field(default=None, ge=0)
    """Only groups whose oldest policy version is of this step or earlier; unset: any."""
    repeat_prompts: bool = False
    """Whether a prompt that was trained on may be trained on again."""
    wait_s: float = Field(default=0.0, ge=0)
    """How long to wait at the log's end for what another process may still append. The last step, and with it
    the run, then depends on when that came."""


class CurriculumConfig(Section):
    """Which of the coming tasks are played, and in which order."""

    epochs: int = Field(default=0, ge=0)
    """How often each task of a finite set (`tasks.family = "directory"`) is played: training ends after so
    many epochs, or after `num_steps`. 0: as often as the steps want. Each epoch has an order of its own."""
    pass_band: tuple[float, float] = (0.0, 1.0)
    """Tasks whose pass rate was outside of this lately are passed over: their own, where tasks come again,
    and that of their level before it is known. The default: none are."""
    min_groups: int = Field(default=4, ge=1)
    """A level is judged after so many groups of it."""
    min_groups_of_task: int = Field(default=1, ge=1)
    """A task is judged by itself after so many groups of it, one an epoch."""
    probe_every: int = Field(default=8, ge=1)
    """Of the tasks that would be passed over, one in so many is played all the same, so that a level whose
    pass rate has changed comes back; of a task itself one epoch in so many."""
    longest_first: int = Field(default=1, ge=1)
    """So many coming tasks are looked at together, and played in the order of the length that sessions of
    their level had lately, longest first. 1: in their own order."""

    @model_validator(mode="after")
    def _band_holds_something(self) -> CurriculumConfig:
        low, high = self.pass_band
        if not 0 <= low < high <= 1:
            raise ValueError(f"pass_band: must be 0 <= low < high <= 1, received {list(self.pass_band)}")
        return self


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
    micro_batch_tokens: int = Field(default=8_192, ge=1)
    """Most tokens in one forward pass, or one longer sequence: decides memory and speed, not the update."""
    refill_below: float = Field(default=0.67, ge=0, le=1)
    """Groups without variance are replaced in another round where less than this share of
    `groups_per_step` is left: a round lasts as long as its longest session, however few groups it has."""
    max_refill_rounds: int = Field(default=2, ge=0)
    """How often groups without variance are replaced by new ones before the step goes on without."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of rollouts."""
    max_staleness: int = Field(default=0, ge=0)
    """Most steps between the policy version of a trajectory's oldest token and the weights that it trains.
    0: rollouts and training take turns. Above: sampling goes on while the trainer is at it. See
    docs/async.md."""
    stale: Stale = "drop"
    """What becomes of trajectories that run past `max_staleness`. `drop`: the trainer waits for those that
    are under way, and drops, and counts, what is too old all the same. `mask`: it waits for none, and leaves
    the tokens that are too old out of the loss."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of running sessions' keys and values when the weights change. `recompute`: they are
    computed again with the new ones. `keep`: sessions go on with them; faster, and further away from what
    the trainer computes."""
    overlap_publication: bool = True
    """With `max_staleness` above 0, over Ray or with borrowed replicas: new weights are uploaded and staged
    while the next step is taken, and one step later in service. Off: the trainer waits for that."""
    extra_members: int = Field(default=0, ge=0)
    """With `max_staleness` above 0: sessions that a group begins beyond `group_size`. It is complete once
    `group_size` of them are graded."""
    stragglers: Stragglers = "abort"
    """What becomes of the others. `abort`: they end at once. `carry`: they go on, and belong to the group if
    they end before it is trained on."""
    baseline: Baseline = "group_mean"
    """What a trajectory's reward is compared with. `group_mean`: the group's mean (Dr.GRPO).
    `group_mean_std`: the same, over the group's standard deviation (GRPO). `leave_one_out`: the mean of the
    others (RLOO)."""
    router_replay: RouterReplay = "r3"
    """Which experts a mixture of experts trains with. `r3`: those that the engine recorded. `r2`: those of
    the trainer's own forward pass at the step's start. `off`: whichever the router chooses."""
    replay_min_share: float = Field(default=0.0, ge=0, le=1)
    """A replayed expert whose score is below this share of the router's own last choice is replaced by the
    router's best that is not replayed; 0: never."""
    keep_routes: bool = False
    """Keep the recorded experts with the run's trajectories, so that others can train on them with `r3`:
    about layers times experts per token bytes for each token. Off, they are let go once they are trained
    on."""
    level_weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """How often tasks of each level are drawn."""
    train_summaries: bool = True
    """Whether the tokens of the agent's summaries are trained on; not to is a control."""
    algorithm: Literal["policy_gradient", "rejection_sampling"] = "policy_gradient"
    """`rejection_sampling` fine-tunes on solved trajectories only: a control."""
    loss: LossConfig = LossConfig()
    """The loss."""
    feedback: FeedbackConfig = FeedbackConfig()
    """Textual feedback."""
    stream: StreamConfig = StreamConfig()
    """Recorded trajectories."""
    reward: RewardConfig = RewardConfig()
    """The reward."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which tasks are played."""
    forks: ForkConfig = ForkConfig()
    """Groups from the middle of a session."""
    adapter: AdapterConfig = AdapterConfig()
    """Low-rank adapters, which are trained instead of the weights. See docs/lora.md."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser of this stage."""

    @model_validator(mode="before")
    @classmethod
    def _take_older_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        taken = dict(cast("dict[str, Any]", values))
        for old, (new, meanings) in _RENAMED.items():
            if isinstance(taken.get(old), bool):
                taken[new] = meanings[taken.pop(old)]
        return taken

    @model_validator(mode="after")
    def _fits_together(self) -> RlConfig:
        if self.updates_per_step > self.groups_per_step:
            raise ValueError(
                f"updates_per_step: must be at most groups_per_step={self.groups_per_step}, "
                f"received {self.updates_per_step}"
            )
        if self.extra_members and not self.max_staleness:
            raise ValueError(
                f"extra_members: needs max_staleness above 0, received {self.extra_members}: a synchronous "
                "step waits for all of its sessions"
            )
        if min(self.level_weights) < 0 or sum(self.level_weights) <= 0:
            raise ValueError(
                f"level_weights: must be >= 0 and not all 0, received {list(self.level_weights)}"
            )
        return self
