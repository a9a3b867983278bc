"""The complete configuration of a run."""

from __future__ import annotations

import functools
import json
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from etude.config.agent import AgentConfig
from etude.config.base import Section
from etude.config.cluster import ClusterConfig
from etude.config.clusters import ClustersConfig
from etude.config.elastic import ElasticConfig
from etude.config.engine import EngineConfig
from etude.config.images import ImagesConfig
from etude.config.model import ModelConfig, TokenizerConfig
from etude.config.monitors import MonitorConfig, ParityConfig
from etude.config.parallel import ParallelConfig
from etude.config.plan import PlanConfig
from etude.config.pretraining import MidtrainConfig, PretrainConfig, SftConfig
from etude.config.reinforcement import RlConfig
from etude.config.sandbox import SandboxConfig
from etude.config.weights import CheckpointConfig, WeightsConfig

QUICKSTART_FAMILY = "etude_quickstart.bug_fixes:BugFixes"
"""The task family of `make train`: a plug-in like any other, shipped with Étude."""
_FAMILIES = {"bug_fixes": QUICKSTART_FAMILY, "trails": "etude_quickstart.trail_family:Trails"}
"""Task families by their short names."""
_OWN_TOOLS = "a foreign agent has its own tools; leave it out, and configure them in the agent's command"
_NEAR = "its endpoint is in the run's own process, where its sandboxes must be too"
_IMPORTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class TasksConfig(Section):
    """Tasks on which the agent is trained and evaluated."""

    family: str = QUICKSTART_FAMILY
    """`MODULE:FUNCTION`: a family of tasks, which is imported from the current directory or an installed
    package, such as one of your own. `bug_fixes` and `trails` are short names for the quickstart's: small
    repositories with a planted bug, and chains of files that refer to each other, more than fit into a
    context, with a key to remember. `directory`: tasks in a directory, which are repeated in each epoch;
    mid-training, if there is any, uses the corpus of `bug_fixes`. See docs/tasks.md."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Settings of a family of your own."""
    directory: str = ""
    """With `family = "directory"`: directory with one Harbor task directory per task."""
    only: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """With `family = "directory"`: only tasks whose metadata have these values, such as
    `difficulty = "easy"`."""
    observed_share: float = Field(default=0.0, ge=0, le=1)
    """With `bug_fixes`: share of reinforcement learning's tasks that are `observed`, whose rule only a test
    run reveals. Above 0 the run is also evaluated on them. See docs/bug-fixes.md."""
    composed_share: float = Field(default=0.0, ge=0, le=1)
    """The same for `composed` tasks: two bugs at once, each in a file of its own, of pairs of kinds that
    evaluation does not have."""
    check: Literal["leave_out", "stop"] = "leave_out"
    """Treatment of tasks in `directory` whose reference solution does not earn 1, in which doing nothing does
    not earn 0, or whose image is not available. `leave_out`: they are listed and not used. `stop`: the run
    does not start. A task that passed is not checked again until it changes. See docs/tasks.md."""
    require_solution: bool = True
    """Whether tasks in `directory` without a reference solution are left out. Otherwise they are only checked
    for doing nothing to earn 0, which does not show that they can be solved."""
    public_hosts: tuple[str, ...] = ()
    """Hosts that tasks with a public network may reach, as `host:port` or `*.domain:port`; empty: none."""
    host_env: tuple[str, ...] = ()
    """Environment variables of this process that tasks in `directory` may read as `${NAME}`. A task that
    names another one that is set is left out."""
    heldout_directory: str = ""
    """Directory with the tasks for evaluation. Empty: those of `directory` with `split = "heldout"` in their
    metadata, as `etude tasks make` writes; if there are none, `heldout_share` of them. They are not trained
    on."""
    heldout_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of the tasks in `directory` that is held out, at least one. The choice depends only on the ids of
    the tasks."""
    trail_lengths: tuple[int, int] = (6, 60)
    """Number of files in the shortest and the longest trail in training."""
    trail_lengths_at_end: tuple[int, int] | None = None
    """The same at the end of reinforcement learning; both numbers grow towards it, task by task. Unset: they
    do not change."""
    trail_heldout_lengths: tuple[int, int] = (250, 400)
    """Number of files in the trails of the split `heldout`, and of `heldout_family`."""
    trail_note_key: float = Field(default=0.4, ge=0, le=1)
    """Share of the scripted author's sessions in mid-training whose summaries keep the key."""
    trail_key_weight: float = Field(default=4.0, ge=0)
    """Loss weight of summaries and of the answer in mid-training, relative to the agent's other messages: a
    key is copied once for every twenty copies of names of files."""

    @property
    def has_shipped_family(self) -> bool:
        """Whether Étude ships the corpus of mid-training for this family."""
        return self.family in ("directory", *_FAMILIES.values())

    @field_validator("family")
    @classmethod
    def _with_its_module(cls, name: str) -> str:
        """Replaces a short name by MODULE:FUNCTION."""
        if name in _FAMILIES or name == "directory" or _IMPORTED.fullmatch(name):
            return _FAMILIES.get(name, name)
        raise ValueError(f"must be {', '.join(_FAMILIES)}, directory or MODULE:FUNCTION, received {name!r}")

    @model_validator(mode="after")
    def _directory_is_named(self) -> TasksConfig:
        if self.options and self.has_shipped_family:
            raise ValueError(f"options: need a task family of your own, received some with {self.family!r}")
        if (self.family == "directory") != bool(self.directory):
            raise ValueError(
                'directory: must be named with family = "directory", and only then, '
                f"received {self.directory!r} with {self.family!r}"
            )
        if self.observed_share + self.composed_share > 1:
            raise ValueError(
                "observed_share, composed_share: must be at most 1 together, received "
                f"{self.observed_share:g} and {self.composed_share:g}"
            )
        for name in ("heldout_directory", "only"):
            if getattr(self, name) and not self.directory:
                raise ValueError(f"{name}: needs directory")
        return self


class EvaluationConfig(Section):
    """Evaluation before, after and during training."""

    num_tasks: int = Field(default=240, ge=1)
    """Number of held-out tasks per evaluation."""
    num_family_tasks: int = Field(default=96, ge=1)
    """Number of tasks of families that are never trained on, before and after. At most `num_tasks`."""
    num_samples: int = Field(default=8, ge=1)
    """Number of sessions at temperature 1 of each repeated task, from which pass@k is estimated."""
    num_repeated_tasks: int = Field(default=48, ge=1)
    """Number of held-out tasks that are played `num_samples` times, before and after. These are the first of
    `num_tasks`."""
    num_acting_tasks: int = Field(default=24, ge=1)
    """Number of `observed` and of `composed` tasks that are played once greedily and `num_samples` times at
    temperature 1, before and after, in runs that train on them."""
    every_steps: int = Field(default=0, ge=0)
    """Number of RL steps between evaluations on the held-out tasks during training, in a process of their
    own. Requires `executor = "ray"`. 0: only before and after training."""


class RunConfig(Section):
    """All settings of a run. They are stored with it as `config.toml`."""

    name: str = Field(default="quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its directory under `runs_directory`. `etude pretrain` and `etude sft` without one:
    `pretrain`, `sft`."""
    runs_directory: str = "runs"
    """Directory in which run directories are created."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the weights, the tasks and the sampling noise."""
    executor: Literal["local", "ray"] = "local"
    """`local`: every part in this process, on a deterministic schedule (except with vLLM or borrowed
    replicas). `ray`: trainer and engines in processes of their own, here or on a cluster. See
    docs/cluster.md."""
    colocated: bool = False
    """Whether trainer and engine share one device in turn. The engine releases its keys and values while the
    trainer steps, the optimiser state stays in host memory while sessions run, and the weights exist once
    except during updates. The results are the same bit by bit, with less memory and some seconds more per
    step on a GPU; see docs/planning.md. Requires `executor = "local"`, one rank and `rl.max_staleness =
    0`."""
    num_threads: int = Field(default=0, ge=0)
    """Number of compute threads of training, which changes no bit of the result. 0: each stage measures in
    its first steps which number is fastest, and prints it; again when it is resumed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for training and sampling. `cuda`: the first GPU that CUDA reports, see docs/gpu.md. `auto`: a
    GPU if there is one with Triton, otherwise `cpu`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of weights, keys and values. `bfloat16` works on a GPU only; the router, the output head
    and the sum over experts stay in float32. `auto`: `bfloat16` on a GPU, `float32` on a CPU."""
    numerics: Literal["fast", "invariant"] = "fast"
    """`fast`: the fastest way to compute each result. `invariant`: in reinforcement learning every sum has a
    fixed order in trainer and engine, so that both give a token the same bits whatever else is in the batch;
    float32 on a CPU, with a C compiler. See docs/parity.md."""
    activation_checkpointing: bool = False
    """Whether training stores only the inputs of each block and computes the rest again for the backward
    pass: more work, much less memory, the same gradients. Works for the architectures that Étude defines."""
    max_wall_s: float = Field(default=0.0, ge=0)
    """How long a run may take, in seconds; 0: no limit, every configured step is taken. Before `etude train`
    begins to train it measures this machine and turns the limit into a plan: fewer mid-training and RL steps,
    evaluation counted in, RL with at least 40 % of the time. The plan replaces `midtrain.num_steps` and
    `rl.num_steps` in the run's stored `config.toml`, which then has no limit: a run of that file takes the
    same steps. A limit too short for 40 % of the mid-training steps and one RL step is refused. Afterwards no
    time limit ends the run: on a machine that becomes slower it takes longer, and the progress line shows how
    long. If the run cannot be measured beforehand (a GPU, several processes, `colocated`, vLLM, borrowed
    replicas, other clusters, a foreign agent), and in `etude pretrain`, `etude sft` and runs on recorded
    trajectories, the limit ends each invocation like Ctrl-C: the state is saved, the stage is not finished,
    and `--resume` continues."""
    initial_checkpoint: str | None = None
    """Hugging Face directory to start from instead of mid-training. Its config.json replaces the section
    `model`. Architectures that Étude does not define train through transformers and sample through vLLM."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    model: ModelConfig = ModelConfig()
    """The model."""
    tasks: TasksConfig = TasksConfig()
    """The tasks."""
    agent: AgentConfig = AgentConfig()
    """The agent's limits."""
    sandbox: SandboxConfig = SandboxConfig()
    """The sandbox."""
    images: ImagesConfig = ImagesConfig()
    """Images of tasks."""
    engine: EngineConfig = EngineConfig()
    """The inference engine."""
    midtrain: MidtrainConfig = MidtrainConfig()
    """Mid-training."""
    pretrain: PretrainConfig = PretrainConfig()
    """Continued pre-training, by `etude pretrain`."""
    sft: SftConfig = SftConfig()
    """Supervised fine-tuning on sessions, by `etude sft`."""
    rl: RlConfig = RlConfig()
    """Reinforcement learning."""
    parallel: ParallelConfig = ParallelConfig()
    """The processes that take its optimiser steps."""
    parity: ParityConfig = ParityConfig()
    """The gate between trainer and engine."""
    monitors: MonitorConfig = MonitorConfig()
    """Alarms on drift of behaviour."""
    plan: PlanConfig = PlanConfig()
    """Assumptions of `etude plan`, and whether a run that does not fit is started."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    weights: WeightsConfig = WeightsConfig()
    """Transport of published weights to the engines."""
    cluster: ClusterConfig = ClusterConfig()
    """The processes of `executor = "ray"`."""
    clusters: ClustersConfig = ClustersConfig()
    """Sessions in other clusters."""
    elastic: ElasticConfig = ElasticConfig()
    """Replicas that are borrowed from a serving pool."""

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        if self.numerics == "invariant":
            self._check_invariant()
        if self.colocated:
            self._check_colocated()
        if self.rl.curriculum.epochs and self.tasks.family != "directory":
            raise ValueError(
                'rl.curriculum.epochs: needs tasks.family = "directory", received '
                f"{self.rl.curriculum.epochs}: generated tasks never end"
            )
        if self.clusters.listen:
            self._check_clusters()
        if self.elastic.router:
            self._check_elastic()
        # The window of a given checkpoint is in its config.json, and looked up when the run starts.
        if self.initial_checkpoint is None and self.agent.max_tokens > self.model.max_positions:
            raise ValueError(
                f"agent.max_tokens: must be at most model.max_positions={self.model.max_positions}, "
                f"received {self.agent.max_tokens}"
            )
        if self.rl.adapter.rank and self.parallel.fsdp * self.parallel.expert * self.parallel.tensor > 1:
            raise ValueError(
                "parallel: fsdp, expert and tensor must be 1 with rl.adapter: it needs whole weights in each "
                "process"
            )
        if self.executor == "ray" and self.engine.backend == "vllm":
            self._check_vllm_replicas()
        if self.rl.feedback.weight:
            self._require("with rl.feedback, whose sequences are not cut", ("parallel.context", 1))
        if self.rl.stream.source:
            because = "with rl.stream.source: recorded sessions are trained on in one process"
            self._require(because, ("executor", "local"))
        if self.executor != "ray":
            self._require(
                'without executor="ray", where evaluation and sessions have processes of their own',
                ("evaluation.every_steps", 0),
                ("cluster.workers", 0),
            )
        if self.agent.max_message_tokens >= self.agent.max_tokens:
            raise ValueError(
                f"agent.max_message_tokens: must be under agent.max_tokens={self.agent.max_tokens}, "
                f"received {self.agent.max_message_tokens}"
            )
        if self.agent.summary_at_tokens:
            self._check_summaries()
        if self.agent.harness.command:
            self._check_harness()
        return self

    @property
    def is_apart(self) -> bool:
        """Whether trainer and engine run concurrently: over Ray in separate processes, with borrowed replicas
        in threads of this one. Otherwise they alternate."""
        return self.executor == "ray" or bool(self.elastic.router)

    def _check_summaries(self) -> None:
        agent = self.agent
        kept = agent.max_message_tokens
        if agent.max_summaries:  # the request for one has at least one token; sessions count all of them
            kept += agent.max_summary_tokens + 1
        if agent.summary_at_tokens + kept > agent.max_tokens:
            raise ValueError(
                f"agent.summary_at_tokens: must leave {kept} of agent.max_tokens={agent.max_tokens} for a "
                f"message and a summary, received {agent.summary_at_tokens}"
            )

    def _check_harness(self) -> None:
        sandbox = self.sandbox
        for field, received, why in (
            ("rl.stream.source", self.rl.stream.source, "recorded sessions are not played"),
            ("rl.forks.share", self.rl.forks.share, "a foreign agent's session cannot be forked"),
            ("agent.mcp", sorted(self.agent.mcp), _OWN_TOOLS),
            ("agent.index", self.agent.index.removeprefix("none"), _OWN_TOOLS),
            ("agent.summary_at_tokens", self.agent.summary_at_tokens, "a foreign agent summarises by itself"),
            ("sandbox.server", sandbox.server or sandbox.servers_file or sandbox.servers, _NEAR),
            ("cluster.workers", self.cluster.workers, _NEAR),
            ("clusters.listen", self.clusters.listen, _NEAR),
            ("evaluation.every_steps", self.evaluation.every_steps, _NEAR),
        ):
            if received:
                raise ValueError(
                    f"{field}: must not be set with agent.harness.command, received {received!r}: {why}"
                )
        if self.agent.harness.directory and sandbox.backend != "local":
            raise ValueError(
                'agent.harness.directory: needs sandbox.backend = "local", received '
                f"{sandbox.backend!r}; put the agent into the image instead"
            )

    def _check_vllm_replicas(self) -> None:
        vllm = self.engine.vllm
        if vllm.url and (self.cluster.engines > 1 or self.evaluation.every_steps):
            raise ValueError(
                'engine.vllm.url: must be empty with executor="ray" and several engines, each of which '
                f"starts a server of its own with engine.vllm.python, received {vllm.url!r}"
            )
        for part in ("engine", "evaluation"):
            gpus = getattr(self.cluster, part).gpus
            if gpus is not None and vllm.num_gpus > 1 and gpus < vllm.num_gpus:
                raise ValueError(
                    f"cluster.{part}.gpus: must be at least {vllm.num_gpus}, which engine.vllm.arguments "
                    f"divide a replica over, received {gpus:g}; or leave it out"
                )

    def _require(self, because: str, *needed: tuple[str, object], fix: str = "") -> None:
        """Raises ValueError for a field, such as `parallel.ranks`, that has another value than needed.
        `because`: under which setting, from `with` on; `fix`: another way out."""
        for field, value in needed:
            received: object = functools.reduce(getattr, field.split("."), self)
            if received != value:
                wanted, found = json.dumps(value), json.dumps(received)  # as TOML writes them
                raise ValueError(f"{field}: must be {wanted} {because}, received {found}{fix}")

    def _check_elastic(self) -> None:
        self._require(
            "with elastic.router", ("engine.backend", "etude"), ("rl.stream.source", ""), ("colocated", False)
        )
        if not self.weights.url:
            raise ValueError(
                "weights.url: must name a store with elastic.router, from which borrowed replicas take the "
                "run's weights"
            )

    def _check_colocated(self) -> None:
        self._require(
            "with colocated=true, where trainer and engine take turns",
            ("executor", "local"),
            ("engine.backend", "etude"),
            ("parallel.ranks", 1),
            ("rl.max_staleness", 0),
            fix="; or set colocated=false",
        )

    def _check_clusters(self) -> None:
        if not self.weights.url:
            raise ValueError("weights.url: must name a store with clusters.listen, for clusters to read")
        self._require("with clusters.listen", ("rl.stream.source", ""))
        if self.clusters.max_version_lag > self.rl.max_staleness:
            raise ValueError(
                f"clusters.max_version_lag: must be at most rl.max_staleness={self.rl.max_staleness}, "
                f"received {self.clusters.max_version_lag}"
            )

    def _check_invariant(self) -> None:
        because = 'with numerics="invariant": sums over ranks have another order than the engine\'s'
        self._require(because, ("parallel.tensor", 1))
        for field, received, fix in (
            ("backend", self.engine.backend, "etude"),
            ("kernels", self.engine.kernels, "native"),
            ("cache_dtype", self.engine.cache_dtype, "float32"),
            ("weight_dtype", self.engine.weight_dtype, "float32"),
        ):
            if received not in (fix, "auto"):
                raise ValueError(
                    f'engine.{field}: must be {fix!r} with numerics="invariant", received {received!r}'
                )
