"""A whole run: tokenizer, mid-training, evaluation, reinforcement learning, evaluation, report."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from etude.agent import agent_format, open_renderer
from etude.config import RunConfig
from etude.controller.arrangement import (
    Arrangement,
    RunContext,
    executor_of,
    is_reproducible,
    open_local,
)
from etude.controller.clusters.runner import RunnerAndSink, open_clusters
from etude.controller.compute import place_model, resolve_compute, resolve_numerics, use_sampling_threads
from etude.controller.evaluate import CURVE, FINAL, MIDTRAINED
from etude.controller.families import open_family
from etude.controller.forecast import (
    Forecast,
    continue_plan,
    evaluation_sizes,
    plan_steps,
    store_plan,
    with_validation,
)
from etude.controller.judging import Judging, add_stage_time
from etude.controller.models import open_model, resolve_model
from etude.controller.parity import ParityGate
from etude.controller.parts import Parts
from etude.controller.probing import Probe, can_probe, probe_speeds
from etude.controller.reinforcement import (
    ReinforcementLoop,
    Validation,
    make_collector,
    overlaps_publication,
)
from etude.controller.remote.arrangement import open_remote
from etude.controller.remote.evaluation import BackgroundEvaluation
from etude.controller.stages import MIDTRAINING, STAGE, run_midtraining
from etude.controller.stopping import StopSignal
from etude.controller.stored import RUN_TOKENIZER
from etude.controller.throughput import Snapshot, part_seconds, throughput_figures
from etude.controller.training_part import LATEST, TrainingPart
from etude.errors import ResourceError
from etude.evaluation import play_sessions, plays_of
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.observe import (
    JsonlSink,
    MetricSink,
    MonitoredSink,
    Observer,
    RunDirectory,
    read_metrics,
)
from etude.protocols import Executor, Handle
from etude.records import SamplingParams, Task, Trajectory
from etude.rollout.collect import CollectorState
from etude.rollout.epochs import EpochSource
from etude.store.trajectories import TrajectoryLog
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer
from etude.training import Document, load_checkpoint, save_checkpoint
from etude.training.checkpoints import find_resumable, read_state

ADAPTER = "adapter"
ROUTES = "routes"
LEARNING = "reinforcement learning"
"""Name of the stage in messages."""


class InterruptedRunError(KeyboardInterrupt):
    """The run was interrupted; its state is saved, and `--resume` continues it."""


def train(
    config: RunConfig, run: RunDirectory, observer: Observer, resume: bool, probe: Probe = probe_speeds
) -> dict[str, Any]:
    """Trains as `config` says and returns the report, which is also in `report.json`. `probe`: measures the
    machine for the forecast.

    With `resume` continues where an earlier process of the same run ended, however it ended; a finished run
    only returns its report. Raises InterruptedRunError after Ctrl-C or SIGTERM, with the state saved.
    """
    with run.lock():
        report = (run.read_json(run.report_file) or {}) if resume else {}
        with_forecast = can_probe(config)
        if resume:
            has_begun = bool({"forecast_s", "heldout_before"} & set(report)) or _has_checkpoints(run)
            config = continue_plan(config, run, has_begun=has_begun, is_planned=with_forecast)
        ended = report.get("rl_steps") == config.rl.num_steps or report.get("tasks_exhausted", False)
        if "heldout_after" in report and ended:
            observer.say("the run has already finished")
            return report
        for key in [key for key in report if key.endswith("_after") or key == "wall_s"]:
            del report[key]  # of a process that ended before the run did
        for sides in report.get("families", {}).values():
            sides.pop("after", None)
        with JsonlSink(run.metrics_file) as rows:
            metrics = MonitoredSink(rows, config.monitors, observer, read_metrics(run.metrics_file))
            newest = find_resumable(run.checkpoints / LATEST, metrics, observer)
            state = (read_state(newest) or {}) if newest is not None else {}
            limit_s = 0.0 if with_forecast else config.max_wall_s
            with StopSignal(observer, limit_s, float(state.get("elapsed_s", 0.0))) as stop:
                return _Run(config, run, observer, stop, metrics, report, newest, state, probe).execute()


def _has_checkpoints(run: RunDirectory) -> bool:
    return any((run.checkpoints / name).exists() for name in (LATEST, MIDTRAINED))


@dataclass
class _Run:
    """A run in this process, from start or resumption to its end."""

    config: RunConfig
    run: RunDirectory
    observer: Observer
    stop: StopSignal
    metrics: MetricSink
    report: dict[str, Any]
    newest: Path | None
    """The checkpoint to resume from."""
    state: dict[str, Any]
    """Of that checkpoint."""
    probe: Probe
    executor: Executor | None = None
    """Starts the parts of a run that are in processes or threads of their own."""

    def __post_init__(self) -> None:
        self.log = TrajectoryLog(self.run.trajectories)
        self.family = open_family(self.config, self.observer)

    def execute(self) -> dict[str, Any]:
        for words in self.family.notes:
            self.observer.say(words)
        self.config = resolve_numerics(resolve_model(self.config))
        self.config = resolve_compute(self.run, self.config, self.observer)
        self.run.update_environment({"reproducible": is_reproducible(self.config)})
        with contextlib.ExitStack() as stack:
            if self.config.is_apart:
                self.executor = stack.enter_context(executor_of(self.config))
            self._expect_stages()
            tokenizer, model = self._midtrained()
            self.report = {"rl_steps": 0, **self.report, "rl_steps_planned": self.config.rl.num_steps}
            asyncio.run(self._after_midtraining(tokenizer, model))
        return self.report

    # ---- stages ---------------------------------------------------------------------------------

    def _midtrained(self) -> tuple[Tokenizer, AnyModel]:
        """Tokenizer and mid-trained model: configured, finished in an earlier process, or trained now."""
        if self.config.initial_checkpoint is not None:
            directory = Path(self.config.initial_checkpoint)
            tokenizer = agent_format(Tokenizer.load(directory), self.config.agent).tokenizer
            self._forecast(lambda: open_model(self.config, directory), tokenizer, [])
            return tokenizer, open_model(self.config, directory)
        done = self.run.checkpoints / MIDTRAINED
        if done.exists():
            return Tokenizer.load(done), load_checkpoint(done)[0]
        return self._midtrain(done)

    def _midtrain(self, done: Path) -> tuple[Tokenizer, LanguageModel]:
        self.observer.say("reading the corpus")
        tokenizer_directory = self.run.path / RUN_TOKENIZER
        is_new = not (tokenizer_directory / TOKENIZER_FILE).exists()
        with self.stop.preparing():
            if is_new:
                tokenizer = self.family.train_tokenizer(self.observer)
            else:
                tokenizer = Tokenizer.load(tokenizer_directory)
            documents = self.family.documents(open_renderer(tokenizer, self.config.agent), self.observer)

        def make_model() -> LanguageModel:
            model = LanguageModel(self.config.model, tokenizer.vocab_size)
            model.initialise(self.config.seed)
            return model

        self._forecast(make_model, tokenizer, documents)
        if is_new:
            tokenizer.save(tokenizer_directory)
        config, model = self.config, place_model(make_model(), self.config)
        latest, save_curve = self.run.checkpoints / LATEST, functools.partial(self.save_curve, model)
        before = self.stop.elapsed_s
        newest = self.newest if self.state.get("stage") == STAGE else None
        complete = run_midtraining(
            model, documents, config, latest, newest, self.stop, self.metrics, self.observer, save_curve
        )
        add_stage_time(self.report, "midtrain_s", self.stop.elapsed_s - before)
        if not complete:
            raise InterruptedRunError(f"resume with: etude train --resume --name {self.run.name}")
        save_checkpoint(done, model, write_more=tokenizer.save)
        return tokenizer, model

    def _forecast(
        self, make_model: Callable[[], AnyModel], tokenizer: Tokenizer, documents: Sequence[Document]
    ) -> None:
        """Reports a forecast of the run's time, and converts `max_wall_s` to steps: once, before anything is
        trained or saved. Raises ConfigError where the time is too short."""
        if not can_probe(self.config) or "forecast_s" in self.report or _has_checkpoints(self.run):
            return
        asked, model = self.config, place_model(make_model(), self.config)
        assert isinstance(model, LanguageModel), "resolved: other architectures sample through vLLM"
        speeds = self.probe(asked, model, tokenizer, documents, self.family)
        if "validation" in self.family.splits:
            speeds = with_validation(speeds, asked)
        measured = (speeds, self.stop.elapsed_s, sum(size for _, size in self._evaluations))
        if asked.max_wall_s:
            self.config = plan_steps(asked, *measured)
            self.family = open_family(self.config)  # which may depend on the number of steps
            store_plan(self.run, asked, self.config)
            steps = self.config.midtrain.num_steps, self.config.rl.num_steps
            self.observer.say(
                "plan for {:g} s: {} steps of mid-training, {} of RL".format(asked.max_wall_s, *steps)
            )
        source = self.family.source()
        num_groups = source.end if isinstance(source, EpochSource) else None
        forecast = Forecast.of(self.config, *measured, num_groups)
        self.observer.say(forecast.describe())
        self.run.update_environment({"forecast": asdict(forecast)})
        self.report["forecast_s"] = forecast.total_s
        self.run.write_report(self.report)
        self._expect_stages()

    def _expect_stages(self) -> None:
        """Tells the progress line the expected time of each stage, from the forecast."""
        stored = self.run.environment.get("forecast")
        if stored is None:
            return
        forecast = Forecast(**stored)
        evaluation_s = forecast.evaluation_s / sum(size for _, size in self._evaluations)
        judged = [(f"evaluation {name}", size * evaluation_s) for name, size in self._evaluations]
        num_before = len(judged) // 2
        midtraining, learning = (MIDTRAINING, forecast.midtrain_s), (LEARNING, forecast.rl_s)
        self.observer.expect_stages([midtraining, *judged[:num_before], learning, *judged[num_before:]])

    @functools.cached_property
    def _heldout(self) -> list[Task]:
        """The tasks that the run is evaluated on."""
        return self.family.evaluation_tasks("heldout", self.config.evaluation.num_tasks)

    @property
    def _evaluations(self) -> list[tuple[str, float]]:
        """See evaluation_sizes."""
        has_others = "heldout_family" in self.family.splits
        num_heldout, acting = len(self._heldout), self.family.acting
        return evaluation_sizes(
            self.config.evaluation, num_heldout, has_other_families=has_others, acting=acting
        )

    async def _after_midtraining(self, tokenizer: Tokenizer, model: AnyModel) -> None:
        training_threads = torch.get_num_threads()
        use_sampling_threads(self.config)
        judging = Judging(self.config, self.run, self.metrics, self.observer, self.stop, self.report)
        async with (
            self._arrange(tokenizer, model, training_threads) as arrangement,
            contextlib.AsyncExitStack() as clusters,
        ):
            parts = arrangement.parts
            heldout = self._heldout
            has_others = "heldout_family" in self.family.splits
            num_others = min(self.config.evaluation.num_tasks, self.config.evaluation.num_family_tasks)
            others = self.family.evaluation_tasks("heldout_family", num_others) if has_others else []
            async with arrangement.training as trainer:
                if self.newest is not None and self.state.get("stage") == "rl":
                    await trainer.call(TrainingPart.restore, self.newest)
                await judging.judge_before(heldout, others, self.family, trainer, parts)
                opening = open_clusters(
                    self.config,
                    parts.renderer,
                    RunnerAndSink(parts.environment, parts.service),
                    parts.blobs.put,
                    self.log,
                    self.run.path,
                    self.metrics,
                    self.observer,
                )
                runner_and_sink = await clusters.enter_async_context(opening)
                await self._reinforce(trainer, parts, runner_and_sink, arrangement.background)
                await runner_and_sink.announce_end()
                await trainer.call(TrainingPart.save_model, self.run.checkpoints / FINAL, True)
                base = self.config.initial_checkpoint or str(self.run.checkpoints / MIDTRAINED)
                await trainer.call(TrainingPart.save_adapters, self.run.checkpoints / ADAPTER, base)
            num_repeated = self.config.evaluation.num_repeated_tasks
            after = await judging.judge(heldout, "after", parts, num_repeated)
            family = await judging.judge(others, "family", parts) if others else None
            await judging.judge_families(self.family, "after", parts)
            judging.finish(heldout, after, family)

    def _arrange(
        self, tokenizer: Tokenizer, model: AnyModel, num_threads: int
    ) -> AbstractAsyncContextManager[Arrangement]:
        initial = self.config.initial_checkpoint
        # Groups that a killed run had collected ahead are trained on after it resumes: with their routes.
        keeps_routes = self.config.rl.keep_routes or self.config.rl.max_staleness > 0
        context = RunContext(
            self.run,
            Path(initial) if initial is not None else self.run.checkpoints / MIDTRAINED,
            self.run.path / ROUTES if keeps_routes else None,
            self.metrics,
            self.observer,
            self.report.setdefault("faults", {}),
            self._heldout,
        )
        if self.executor is None:
            return open_local(self.config, tokenizer, model, context, num_threads)
        return open_remote(self.executor, self.config, tokenizer, model, context)

    async def _reinforce(
        self,
        trainer: Handle[TrainingPart],
        parts: Parts,
        runner_and_sink: RunnerAndSink,
        background: BackgroundEvaluation | None,
    ) -> None:
        config = self.config
        source = self.family.source()
        collector = make_collector(runner_and_sink.runner, parts.service, source, config)
        saved: dict[str, Any] = self.state.get("loop", {}) if self.state.get("stage") == "rl" else {}
        if saved:
            collector.state = CollectorState(**saved)
        gate = self._make_gate(trainer, parts, collector.state.next_task)
        loop = ReinforcementLoop(
            trainer,
            runner_and_sink.sink,
            collector,
            self.log,
            parts.blobs,
            self.metrics,
            self.observer,
            self.stop,
            gate,
            config.rl.kv_on_update,
            lambda: part_seconds(parts),
            overlap=overlaps_publication(config),
            validation=self._make_validation(parts),
        )
        loop.first_step = (await trainer.call(TrainingPart.current_version)).step
        loop.parity.update(self.report.get("parity", {}))
        self.report["parity"] = loop.parity
        loop.sessions.update(self.report.get("rl_sessions", {}))
        self.report["rl_sessions"] = loop.sessions
        if background is not None:
            background.resume_from(loop.first_step)
        saver = _Saver(self, trainer, loop, background)
        self.observer.stage_begins(LEARNING, config.rl.num_steps)
        if loop.first_step:
            self.observer.say(f"continuing after step {loop.first_step}")
        before, began = self.stop.elapsed_s, Snapshot.of(parts, loop)
        taken = await loop.run(config.rl.num_steps, saver)
        await saver.finish()
        throughput = throughput_figures(began, Snapshot.of(parts, loop), loop)
        add_stage_time(self.report, "rl_s", self.stop.elapsed_s - before)
        self.observer.stage_ends()
        self.report["rl_steps"] = taken
        self.report["tasks_exhausted"] = loop.exhausted
        is_short = taken < config.rl.num_steps and not loop.exhausted
        if taken > loop.first_step or "throughput" not in self.report:
            self.report["throughput"] = throughput
        self.run.write_report(self.report)
        if self.stop and is_short:
            raise InterruptedRunError(f"resume with: etude train --resume --name {self.run.name}")

    def _make_validation(self, parts: Parts) -> Validation | None:
        """The validation that determines the weight of the price, if it is configured: see PriceConfig."""
        config, price = self.config, self.config.rl.reward.price
        if not config.rl.validation_sessions or "validation" not in self.family.splits:
            return None
        tasks = self.family.evaluation_tasks("validation", price.validation_tasks)

        def play() -> Awaitable[list[Trajectory]]:
            name, params = f"{config.name}-validation", SamplingParams(temperature=0.0)
            plays, slots = plays_of(tasks), config.engine.num_slots
            return play_sessions(parts.environment, parts.service, plays, name, config.seed, params, slots)

        return Validation(play, config.rl.reward)

    def _make_gate(self, trainer: Handle[TrainingPart], parts: Parts, next_task: int) -> ParityGate:
        """A parity gate that starts with the prompts of the next tasks."""
        source, last_task = self.family.source(), next_task + self.config.parity.num_sequences
        if isinstance(source, EpochSource) and source.end is not None:
            last_task = min(last_task, source.end)
        coming = [source(number) for number in range(next_task, last_task)]
        prompts = [parts.renderer.prompt(task.instruction) for task in coming]
        gate = ParityGate(self.config, trainer, parts.service, self.observer, prompts)
        gate.worst.update(self.report.get("parity_gate", {}))
        self.report["parity_gate"] = gate.worst
        return gate

    # ---- snapshots ------------------------------------------------------------------------------

    def save_curve(self, model: AnyModel, name: str) -> None:
        """Saves a snapshot for the learning curve, and records its wall time."""
        with self.recording_curve(name):
            save_checkpoint(self.run.checkpoints / CURVE / name, model)

    @contextlib.contextmanager
    def recording_curve(self, name: str) -> Iterator[None]:
        """Records the snapshot saved within. A full disk costs this snapshot only, and not the run."""
        try:
            yield
        except ResourceError as error:
            self.observer.say(f"the snapshot {name} is not saved: {error.message}")
        else:
            self.metrics.write("curve", 0, {"name": name, "wall_s": self.stop.elapsed_s})


@dataclass(frozen=True, slots=True)
class _Saver:
    """Saves after RL steps: the resumable checkpoint by time, curve snapshots by step. Before that it starts
    the evaluation during training, if one is configured and due."""

    run: _Run
    trainer: Handle[TrainingPart]
    loop: ReinforcementLoop
    background: BackgroundEvaluation | None

    async def __call__(self, step: int) -> None:
        run = self.run
        if self.background is not None:
            self.background.judge_if_due(run.stop.elapsed_s)
        every = run.config.checkpoint.curve_every_steps
        if every and step % every == 0:
            await self.loop.complete_publication()
            name = f"rl-{step:05d}"
            with run.recording_curve(name):
                await self.trainer.call(TrainingPart.save_model, run.run.checkpoints / CURVE / name)
        if await self.trainer.call(TrainingPart.is_due):
            await self._save()

    async def finish(self) -> None:
        """After the last step: waits until evaluations have ended and everything is on disk."""
        if self.background is not None and not self.run.stop:
            await self.background.wait()
        await self._save()
        await self.trainer.call(TrainingPart.flush)

    async def _save(self) -> None:
        """Saves the resumable checkpoint of the RL stage, once its weights have passed the parity gate."""
        await self.loop.complete_publication()
        run = self.run
        extra = {
            "stage": "rl",
            "score": self.loop.reward,
            "loop": dict(self.loop.collector_state),
            "elapsed_s": run.stop.elapsed_s,
        }
        await self.trainer.call(TrainingPart.save, extra)
        run.report["rl_steps"] = (await self.trainer.call(TrainingPart.current_version)).step
        run.run.write_report(run.report)
