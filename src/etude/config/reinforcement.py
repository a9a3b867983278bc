"""Reinforcement learning: the loss, its corrections, router replay, the reward, the stage."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section
from etude.config.optimizer import OptimizerConfig
from etude.config.reward import RewardConfig


class AdapterConfig(Section):
    """Low-rank adaptation (LoRA): weights are frozen; a product of two thin matrices is trained for each."""

    rank: int = Field(default=0, ge=0)
    """Inner width of the two matrices; 0: no adapters, all weights are trained."""
    alpha: float = Field(default=32.0, gt=0)
    """The product is multiplied by alpha / rank before it is added to the weight."""
    targets: tuple[str, ...] = Field(default=("attention", "feed_forward"), min_length=1)
    """Weights that are adapted: `attention`, `feed_forward` (dense and expert matrices, never routers), or
    names of single ones, such as `qkv`, `q_proj` or `down`."""
    seed: int = Field(default=0, ge=0)
    """Seed of the matrices that are not initialised with zeros."""


ForkTurn = Literal["random", "entropy", "first_edit"]


class ForkConfig(Section):
    """Sessions that are forked at one of their turns and compared with their siblings. See docs/forks.md."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Share of the groups whose first session is forked after it has ended; 0: none. A fork makes a group of
    its own, which counts towards `rl.groups_per_step`."""
    size: int = Field(default=4, ge=2)
    """Number of siblings: sessions that continue from the forked state and are compared with each other."""
    turn: ForkTurn = "entropy"
    """Message from which siblings continue, never a session's first. `random`: any. `entropy`: the one whose
    tokens were least likely on average. `first_edit`: the first one that changed a file."""


Baseline = Literal["group_mean", "group_mean_std", "leave_one_out"]
Normalizer = Literal["group_constant", "tokens", "sequences"]
RouterReplay = Literal["r3", "r2", "off"]
Stale = Literal["drop", "mask"]
Stragglers = Literal["abort", "carry"]


class CorrectionConfig(Section):
    """Corrections for the difference between the trainer's log-probabilities and those that the engine
    sampled with. All are off by default.

    Each compares the trainer's policy at the start of the step with the policy that sampled. If any of them
    is on, the loss bounds the step from the trainer's policy. A bound of 0 is off.
    """

    tis_cap: float = Field(default=0.0, ge=0)
    """Truncated importance sampling: a token's loss times min(ratio, this). Usual: 2."""
    token_low: float = Field(default=0.0, ge=0, lt=1)
    """Tokens whose ratio is below this are masked (IcePop). Usual: 0.5."""
    token_high: float = Field(default=0.0, ge=0)
    """Tokens whose ratio is above this are masked (IcePop). Usual: 5."""
    sequence_low: float = Field(default=0.0, ge=0, lt=1)
    """Sequences with a geometric mean ratio over their tokens below this are masked. Usual: 0.99."""
    sequence_high: float = Field(default=0.0, ge=0)
    """Sequences with a geometric mean ratio above this are masked. Usual: 1.01."""

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
    """`clip`: clipped surrogate. `cispo`: log p, weighted by the importance ratio, capped and detached.
    `gspo`: clipped surrogate with one ratio per sequence. `decoupled`: clipped against the trainer's policy
    at the start of the step, and weighted by the ratio of that policy to the one that sampled."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """`clip`, `decoupled`: the lowest ratio is 1 minus this."""
    clip_high: float = Field(default=0.28, gt=0)
    """`clip`, `decoupled`: the highest ratio is 1 plus this."""
    cispo_cap: float = Field(default=5.0, gt=1)
    """Largest importance ratio of `cispo`."""
    gspo_clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """`gspo`: the lowest ratio of a sequence is 1 minus this."""
    gspo_clip_high: float = Field(default=4e-4, gt=0)
    """`gspo`: the highest ratio of a sequence is 1 plus this."""
    normalizer: Normalizer = "group_constant"
    """Divisor of the summed loss. `group_constant`: trajectories of the update times `constant_tokens`.
    `tokens`: trained tokens of the update. `sequences`: the trajectory's own tokens, then the mean over
    trajectories. A trajectory of many segments has the weight of one sequence of its tokens."""
    constant_tokens: int = Field(default=256, ge=1)
    """Number of tokens that each trajectory counts as under `group_constant`."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from the policy at the start of RL, which is added to the policy's loss;
    clips and masks do not apply to it. See docs/algorithms.md."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of that divergence. 0: no penalty, and no reference policy is kept."""
    balance_weight: float = Field(default=0.0, ge=0)
    """Weight of the router's load-balancing loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Corrections against the sampled log-probabilities."""

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss uses the trainer's own log-probabilities at the step's start."""
        return self.kind == "decoupled" or self.correction.enabled


class FeedbackConfig(Section):
    """Textual feedback: at a faulty turn, the policy with a hint about the mistake teaches the policy without
    it."""

    weight: float = Field(default=0.0, ge=0)
    """Weight of the mean divergence per token; 0: off."""
    max_hints_per_trajectory: int = Field(default=2, ge=1)
    """Largest number of faulty turns per trajectory that are used, the first ones."""


class StreamConfig(Section):
    """Training on stored trajectories, in the order in which they were stored."""

    source: str = ""
    """Run directory or trajectory log to train on instead of sampling. Empty: sample."""
    min_step: int = Field(default=0, ge=0)
    """Uses only groups whose oldest policy version is of this step or later."""
    max_step: int | None = Field(default=None, ge=0)
    """Uses only groups whose oldest policy version is of this step or earlier. Unset: any."""
    repeat_prompts: bool = False
    """Whether a prompt may be trained on more than once."""
    wait_s: float = Field(default=0.0, ge=0)
    """Seconds to wait at the log's end for trajectories that another process may still append. The last step
    then depends on when they arrive, and so does the run."""


class CurriculumConfig(Section):
    """Selection and order of the next tasks."""

    epochs: int = Field(default=0, ge=0)
    """Number of times that each task of a finite set (`tasks.family = "directory"`) is used. Training ends
    after this many epochs, or after `num_steps`. 0: no limit. The order differs between epochs."""
    pass_band: tuple[float, float] = (0.0, 1.0)
    """Tasks are skipped if their recent pass rate is outside of this range. The rate is the task's own if it
    was used before, otherwise that of its level. The default skips none."""
    min_groups: int = Field(default=4, ge=1)
    """Number of groups after which the pass rate of a level counts."""
    min_groups_of_task: int = Field(default=1, ge=1)
    """Number of groups, one per epoch, after which the pass rate of a task counts."""
    probe_every: int = Field(default=8, ge=1)
    """One in this many tasks that would be skipped is used all the same, so that changes of the pass rate are
    noticed. For a single task: one epoch in this many."""
    longest_first: int = Field(default=1, ge=1)
    """Number of upcoming tasks that are sorted by the recent length of sessions of their level, longest
    first. 1: the original order."""

    @model_validator(mode="after")
    def _band_holds_something(self) -> CurriculumConfig:
        low, high = self.pass_band
        if not 0 <= low < high <= 1:
            raise ValueError(f"pass_band: must be 0 <= low < high <= 1, received {list(self.pass_band)}")
        return self


class RlConfig(Section):
    """Reinforcement learning."""

    num_steps: int = Field(default=100, ge=0)
    """Number of RL steps; each publishes one policy version."""
    groups_per_step: int = Field(default=12, ge=1)
    """Number of groups with differing verdicts that one step trains on. Groups that were solved, or failed,
    as a whole but have a learning signal are used in addition."""
    group_size: int = Field(default=8, ge=2)
    """Trajectories per group."""
    min_graded: int = Field(default=2, ge=2)
    """Groups with fewer graded members than this are dropped: the others had infrastructure failures, and a
    baseline of few members is unreliable."""
    updates_per_step: int = Field(default=2, ge=1)
    """Number of optimiser updates per step, each on its share of the groups."""
    micro_batch_tokens: int = Field(default=8_192, ge=1)
    """Largest number of tokens in one forward pass, unless a single sequence is longer. Three quarters of a
    prefix of all sequences count once. It determines memory and speed, and changes the update only by
    rounding."""
    refill_below: float = Field(default=0.67, ge=0, le=1)
    """Groups without variance are replaced in another round if fewer than this share of `groups_per_step` is
    left. A round takes as long as its longest session, however few groups it has."""
    max_refill_rounds: int = Field(default=2, ge=0)
    """Largest number of such rounds per step."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of rollouts."""
    max_staleness: int = Field(default=0, ge=0)
    """Largest number of steps between the policy version of a trajectory's oldest token and the weights that
    it trains. 0: rollouts and training alternate. Above 0: sampling continues during training. See
    docs/async.md."""
    stale: Stale = "drop"
    """What happens to trajectories that exceed `max_staleness`. `drop`: the trainer waits for those in
    progress; what is too old nevertheless is dropped and counted. `mask`: the trainer does not wait, and
    tokens that are too old are left out of the loss."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the keys and values of running sessions when the weights change. `recompute`: they are
    computed again with the new weights. `keep`: sessions continue with the old ones, which is faster and
    differs more from what the trainer computes."""
    overlap_publication: bool = True
    """Whether new weights are uploaded and staged during the next step, and come into service one step later.
    Applies with `max_staleness` above 0, over Ray or with borrowed replicas. Off: the trainer waits for the
    upload."""
    extra_members: int = Field(default=0, ge=0)
    """With `max_staleness` above 0: number of sessions that a group starts beyond `group_size`. The group is
    complete once `group_size` of them are graded."""
    stragglers: Stragglers = "abort"
    """What happens to the other sessions of such a group. `abort`: they end at once. `carry`: they continue,
    and belong to the group if they end before it is trained on."""
    baseline: Baseline = "group_mean"
    """Baseline of a trajectory's reward. `group_mean`: the mean of the group (Dr.GRPO). `group_mean_std`: the
    same, divided by the group's standard deviation (GRPO). `leave_one_out`: the mean of the other members
    (RLOO)."""
    router_replay: RouterReplay = "r3"
    """Experts with which a mixture of experts is trained. `r3`: those that the engine recorded. `r2`: those
    of the trainer's own forward pass at the start of the step. `off`: those that the router chooses."""
    replay_min_share: float = Field(default=0.0, ge=0, le=1)
    """A replayed expert is replaced by the router's best expert that is not replayed, if its score is below
    this share of the score of the router's own last choice. 0: never."""
    keep_routes: bool = False
    """Whether the recorded experts are stored with the run's trajectories, so that other runs can train on
    them with `r3`. They take about layers times experts per token bytes for each token. Off: they are deleted
    after training."""
    level_weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Relative frequencies of the task levels."""
    train_summaries: bool = True
    """Whether the tokens of the agent's summaries are trained on; `false` serves as a control."""
    algorithm: Literal["policy_gradient", "rejection_sampling", "best_of_group"] = "policy_gradient"
    """`policy_gradient`: the losses of `rl.loss`. Two controls: `rejection_sampling` is fine-tuning on solved
    trajectories only; `best_of_group` on those of them that have the highest total reward of their group."""
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

    @property
    def validation_sessions(self) -> float:
        """Sessions on validation tasks per step, if the family has such tasks."""
        price = self.reward.price
        looks = bool(price.validate_every) and not self.max_staleness
        return price.validation_tasks / price.validate_every if looks else 0.0

    @model_validator(mode="after")
    def _fits_together(self) -> RlConfig:
        if self.updates_per_step > self.groups_per_step:
            raise ValueError(
                f"updates_per_step: must be at most groups_per_step={self.groups_per_step}, "
                f"received {self.updates_per_step}"
            )
        sampled = [self.group_size, *([self.forks.size] if self.forks.share else [])]
        if self.min_graded > min(sampled):
            raise ValueError(
                f"min_graded: must be at most {min(sampled)}, the members of a group, "
                f"received {self.min_graded}"
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
