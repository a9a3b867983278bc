"""Evaluation during training: every so many steps the version in service is judged; training does not wait.

step 10 in service ──judge──> EvaluationPart (its own engine and sandboxes)
step 11, 12, ... train                │
<── row "evaluation" of step 10 ──────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.config import RunConfig
from etude.controller.backends import open_run_backend
from etude.controller.engines import SampledModel
from etude.controller.remote.engine_part import EnginePart
from etude.controller.remote.fleet import check_build
from etude.controller.supervision import Spawn, Supervision, Supervisor
from etude.environment.episodes import Environment, EpisodeLimits
from etude.evaluation import evaluate_policy
from etude.inference.exchange import Build
from etude.kit.tasks import end_tasks
from etude.observe import MetricSink, Observer
from etude.protocols import Handle
from etude.records import Task, WeightManifest
from etude.tokens.tokenizer import Tokenizer

Judgement = tuple[dict[str, float], list[str]]
"""A version's pass rates, `greedy` and at temperature 1 (`pass_rate`), and the versions of all tokens at
temperature 1."""


class EvaluationPart(EnginePart):
    """Evaluates versions, one at a time, on its own engine's reproducible schedule, and serves nothing else:
    the figures are those of these weights alone, however far training has advanced meanwhile."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        weights: Path,
        limits: EpisodeLimits,
        owner: str,
        model: SampledModel | None = None,
    ) -> None:
        """`weights`, `model`: see EnginePart; `owner`: see RolloutPart. Raises ResourceError where sandboxes
        are not available."""
        super().__init__(config, tokenizer, weights, config.engine.tool_delay_steps, model)
        self._backend = open_run_backend(config.sandbox, owner)
        self._environment = Environment.of_run(config, tokenizer, self._backend, limits, keep_routes=None)

    async def judge(self, manifest: WeightManifest, tasks: Sequence[Task]) -> Judgement:
        """Evaluates a version on the tasks. Raises WeightUpdateError for weights that no longer exist,
        InfrastructureError if most sessions failed."""
        await self.stage(manifest)
        await self.activate(manifest.version, "recompute")
        config = self._config
        name = f"{config.name}-step{manifest.version.step}"
        evaluation = await evaluate_policy(
            self._environment, self._service, tasks, name, config.seed, config.engine.num_slots
        )
        figures = {
            "pass_rate": evaluation.sampled["pass_rate"],
            "greedy": evaluation.greedy["pass_rate"],
        }
        spans = (span for t in evaluation.trajectories for s in t.segments for span in s.version_spans)
        return figures, sorted({str(span.version) for span in spans})

    async def close(self) -> None:
        """Ends the engine's loop and the sandboxes."""
        await super().close()
        await self._environment.close()
        await self._backend.close()


KIND = "evaluation"
SPLIT = "during"


class BackgroundEvaluation:
    """Evaluates versions in a supervised process. For one event loop.

    One version at a time: versions that come into service meanwhile are skipped, and reported. An evaluation
    whose process dies restarts with the next process, up to `give_up_after` times; one that fails is
    reported, and training continues.
    """

    def __init__(
        self,
        spawn: Spawn[EvaluationPart],
        build: Build,
        tasks: Sequence[Task],
        every_steps: int,
        serving: Callable[[], WeightManifest | None],
        supervision: Supervision,
        metrics: MetricSink,
        observer: Observer,
    ) -> None:
        """`build`: required of the process. `serving`: manifest of the weights in service for training."""
        self._build, self._tasks = build, tasks
        self._every_steps, self._serving = every_steps, serving
        self._journal = supervision.journal
        self._metrics, self._observer = metrics, observer
        self._supervisor = Supervisor(KIND, spawn, self._prepare, supervision)
        self._judging: asyncio.Task[None] | None = None
        self._due_step = every_steps
        """The first step whose weights are evaluated next."""

    async def start(self) -> None:
        """Starts the process. Raises what it raises."""
        await self._supervisor.start()

    async def close(self) -> None:
        """Cancels the evaluation in progress, and stops the process."""
        if self._judging is not None:
            await end_tasks(self._judging)
        await self._supervisor.close()

    def resume_from(self, step: int) -> None:
        """Skips all evaluations up to that step."""
        self._due_step = (step // self._every_steps + 1) * self._every_steps

    def judge_if_due(self, wall_s: float) -> None:
        """Starts an evaluation of the weights in service, `wall_s` seconds into the run, if one is due."""
        manifest = self._serving()
        if manifest is None or manifest.version.step < self._due_step:
            return
        step = manifest.version.step
        self.resume_from(step)
        if self._judging is not None and not self._judging.done():
            self._observer.say(f"evaluation of step {step} is skipped: the previous one is still running")
            return
        self._judging = asyncio.create_task(self._judge(manifest, wall_s))

    async def wait(self) -> None:
        """Waits for the evaluation in progress."""
        if self._judging is not None:
            await self._judging

    async def _judge(self, manifest: WeightManifest, wall_s: float) -> None:
        step = manifest.version.step
        try:
            figures, versions = await self._supervisor.call_with_restarts(
                "judge", lambda handle: handle.call(EvaluationPart.judge, manifest, self._tasks)
            )
        except Exception as error:  # of any kind: the next evaluation may succeed
            self._journal.record(KIND, "evaluation failed", f"{manifest.version}: {error or repr(error)}")
        else:
            values = {**figures, "wall_s": wall_s, "split": SPLIT, "versions": ", ".join(versions)}
            self._metrics.write(KIND, step, values)
            text = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
            self._observer.say(f"evaluation of step {step}: {text}")

    async def _prepare(self, handle: Handle[EvaluationPart]) -> None:
        check_build(await handle.call(EvaluationPart.begin), self._build, KIND)
