"""A whole run: tokenizer, mid-training, evaluation, reinforcement learning, evaluation, report."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch

from etude.config import RunConfig
from etude.controller.backends import open_checked_backend
from etude.controller.compute import place_model, settle_compute, use_sampling_threads
from etude.controller.corpus import make_renderer
from etude.controller.examples import choose_examples, session_text
from etude.controller.families import open_family
from etude.controller.local import LocalExecutor
from etude.controller.midtraining import run_midtraining
from etude.controller.models import settle_model
from etude.controller.numerics import settle_numerics, use_numerics
from etude.controller.parity import ParityGate
from etude.controller.parts import Parts, open_parts
from etude.controller.ranks import AnyTrainer, open_trainer
from etude.controller.reinforcement import ReinforcementLoop
from etude.controller.stopping import StopSignal
from etude.controller.throughput import RunThroughput
from etude.errors import CheckpointError
from etude.evaluation import Evaluation, evaluate_policy
from etude.model import LanguageModel, Qwen3Moe
from etude.model.loading import AnyModel, load_any_model
from etude.model.peft import save_peft
from etude.observe import JsonlSink, MetricSink, Observer, RunDirectory, write_json
from etude.protocols import Handle, Resources
from etude.records import Task
from etude.rollout.collect import CollectorState, GroupCollector
from etude.store.trajectories import TrajectoryLog
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer
from etude.training import load_checkpoint, save_checkpoint
from etude.training.checkpoints import CheckpointKeeper, find_resumable, read_state
from etude.training.feedback import open_feedback

MIDTRAINED = "midtrained"
FINAL = "final"
ADAPTER = "adapter"
LATEST = "latest"
TOKENIZER = "tokenizer"
SNAPSHOTS = "snapshots"
OFFENDING = "offending"
ROUTES = "routes"
CURVE = "curve"
SESSIONS_BEFORE = "sessions_before.json"


class InterruptedRunError(KeyboardInterrupt):
    """Somebody stopped the run; its state is saved and `--resume` goes on."""


def train(config: RunConfig, run: RunDirectory, observer: Observer, resume: bool) -> dict[str, Any]:
    """Trains as `config` says and returns the report, which `report.json` holds as well.

    With `resume` goes on where an earlier sitting of the same run ended, however it ended; a run that has
    nothing left to do gives its report again. Raises InterruptedRunError after Ctrl-C or SIGTERM, with the
    state saved.
    """
    with run.lock():
        report = (run.read_json(run.report_file) or {}) if resume else {}
        if "heldout_after" in report and report.get("rl_steps") == config.rl.num_steps:
            observer.say("the run is finished already")
            return report
        with JsonlSink(run.metrics_file) as metrics:
            newest = find_resumable(run.checkpoints / LATEST, metrics, observer)
            state = (read_state(newest) or {}) if newest is not None else {}
            with StopSignal(observer, config.max_wall_s, float(state.get("elapsed_s", 0.0))) as stop:
                return _Run(config, run, observer, stop, metrics, report, newest, state).go()


class _Run:
    """One sitting of a run."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        observer: Observer,
        stop: StopSignal,
        metrics: MetricSink,
        report: dict[str, Any],
        newest: Path | None,
        state: dict[str, Any],
    ) -> None:
        """`newest`: the checkpoint to go on from, with its state."""
        self.config, self.run, self.observer = config, run, observer
        self.stop, self.metrics, self.report = stop, metrics, report
        self.newest, self.state = newest, state
        self.throughput = RunThroughput()
        self.family = open_family(config)

    def go(self) -> dict[str, Any]:
        asyncio.run(open_checked_backend(self.config.sandbox.backend).close())
        self.config = settle_numerics(settle_model(self.config))
        self.config = settle_compute(self.run, self.config, self.observer)
        # vLLM computes requests as they come, and what is computed together decides the last bits.
        self.run.update_environment({"reproducible": self.config.engine.backend == "etude"})
        tokenizer, model = self._midtrained()
        asyncio.run(self._after_midtraining(tokenizer, model))
        return self.report

    # ---- stages ---------------------------------------------------------------------------------

    def _midtrained(self) -> tuple[Tokenizer, AnyModel]:
        """Tokenizer and mid-trained model: given, finished in an earlier sitting, or trained now."""
        if self.config.initial_checkpoint is not None:
            directory = Path(self.config.initial_checkpoint)
            return Tokenizer.load(directory), load_any_model(directory)
        done = self.run.checkpoints / MIDTRAINED
        if done.exists():
            return Tokenizer.load(done), load_checkpoint(done)[0]
        return self._midtrain(done)

    def _midtrain(self, done: Path) -> tuple[Tokenizer, Qwen3Moe]:
        config = self.config
        self.observer.say("reading the corpus")
        tokenizer_directory = self.run.path / TOKENIZER
        if not (tokenizer_directory / TOKENIZER_FILE).exists():
            self.family.train_tokenizer(self.observer).save(tokenizer_directory)
        tokenizer = Tokenizer.load(tokenizer_directory)
        documents = self.family.documents(make_renderer(tokenizer), self.observer)
        model = Qwen3Moe(config.model, tokenizer.vocab_size)
        model.initialise(config.seed)
        place_model(model, config)
        latest = self.run.checkpoints / LATEST

        def save_curve(name: str) -> None:
            self.save_curve(name, model)

        before = self.stop.elapsed_s
        complete = run_midtraining(
            model, documents, config, latest, self.stop, self.metrics, self.observer, save_curve
        )
        self._add_stage_time("midtrain_s", self.stop.elapsed_s - before)
        if not complete:
            raise InterruptedRunError(f"resume with: etude train --resume --name {self.run.name}")
        self._save_model(done, model, tokenizer)
        return tokenizer, model

    async def _after_midtraining(self, tokenizer: Tokenizer, model: AnyModel) -> None:
        training_threads = torch.get_num_threads()
        use_sampling_threads(self.config)
        use_numerics(place_model(model, self.config), self.config)
        routes = self.run.path / ROUTES if self.config.rl.keep_routes else None
        snapshots = self.run.path / SNAPSHOTS
        async with open_parts(self.config, tokenizer, model, snapshots=snapshots, routes=routes) as parts:
            heldout = self.family.evaluation_tasks("heldout", self.config.evaluation.num_tasks)
            with self._open_trainer(model, parts) as trainer:
                if self.newest is not None and self.state.get("stage") == "rl":
                    trainer.restore(self.newest)
                await self._evaluate_before(heldout, trainer, parts)
                await self._reinforce(trainer, parts, training_threads)
                self._save_model(self.run.checkpoints / FINAL, trainer.model, tokenizer)
                self._save_adapters(trainer)
            after = await self._evaluate(heldout, "after", parts)
            family_tasks = self.family.evaluation_tasks("heldout_family", self.config.evaluation.num_tasks)
            family = await self._evaluate(family_tasks, "family", parts)
            self._finish_report(heldout, after, family)

    def _open_trainer(self, model: AnyModel, parts: Parts) -> AbstractContextManager[AnyTrainer]:
        return open_trainer(
            cast(LanguageModel, model),  # any architecture learns through the same packed scoring
            self.config,
            parts.weights,
            parts.blobs.get,
            self.run.path / OFFENDING,
            feedback=open_feedback(self.config.rl.feedback, parts.renderer),
        )

    async def _reinforce(self, trainer: AnyTrainer, parts: Parts, num_threads: int) -> None:
        config, executor = self.config, LocalExecutor()
        source = self.family.source()
        collector = GroupCollector(
            parts.environment, parts.service, source, config.rl, config.name, config.seed
        )
        saved: dict[str, Any] = self.state.get("loop", {}) if self.state.get("stage") == "rl" else {}
        if saved:
            collector.state = CollectorState(**saved)
        threads = max(1, num_threads // config.parallel.ranks)
        handle = await executor.spawn(lambda: trainer, resources=Resources(num_cpus=threads))
        gate = self._make_gate(handle, parts, collector.state.next_task)
        loop = ReinforcementLoop(
            handle,
            parts.service,
            collector,
            TrajectoryLog(self.run.trajectories),
            parts.blobs,
            self.metrics,
            self.observer,
            self.stop,
            gate,
        )
        loop.first_step = trainer.version.step
        loop.parity.update(self.report.get("parity", {}))
        self.report["parity"] = loop.parity
        latest = self.run.checkpoints / LATEST
        keeper = CheckpointKeeper(latest, config.checkpoint, self.metrics, self.observer)
        saver = _Saver(self, trainer, loop, keeper)
        self.observer.stage_begins("reinforcement learning", config.rl.num_steps)
        before = self.stop.elapsed_s
        self.throughput.begin(parts)
        with keeper:
            try:
                taken = await loop.run(config.rl.num_steps, saver)
            finally:
                await executor.shutdown()
            saver.save()
            keeper.flush()
        self.throughput.end(parts, loop)
        self._add_stage_time("rl_s", self.stop.elapsed_s - before)
        self.observer.stage_ends()
        self.report["rl_steps"] = taken
        if taken > loop.first_step or "throughput" not in self.report:
            self.report["throughput"] = self.throughput.to_json()
        write_json(self.run.report_file, self.report)
        if self.stop.interrupted and taken < config.rl.num_steps:
            raise InterruptedRunError(f"resume with: etude train --resume --name {self.run.name}")

    def _make_gate(self, trainer: Handle[AnyTrainer], parts: Parts, next_task: int) -> ParityGate:
        """A gate that begins with the prompts of the tasks that come next."""
        source, last_task = self.family.source(), next_task + self.config.parity.num_sequences
        coming = [source(number) for number in range(next_task, last_task)]
        prompts = [parts.renderer.prompt(task.instruction) for task in coming]
        gate = ParityGate(self.config, trainer, parts.service, self.observer, prompts)
        gate.worst.update(self.report.get("parity_gate", {}))
        self.report["parity_gate"] = gate.worst
        return gate

    # ---- evaluation -----------------------------------------------------------------------------

    async def _evaluate_before(self, tasks: list[Task], trainer: AnyTrainer, parts: Parts) -> None:
        """The mid-trained model's figures, unless an earlier sitting has them."""
        if "heldout_before" in self.report:
            return
        await parts.serve(trainer.model, self.config.name)
        evaluation = await self._evaluate(tasks, "before", parts)
        self.report |= {
            "heldout_before": evaluation.to_json(),
            "behaviour_before": evaluation.behaviour,
            "first_edit_right_before": evaluation.sampled["first_edit_right"],
        }
        texts = {task.id: session_text(t) for task, t in zip(tasks, evaluation.trajectories, strict=True)}
        passed = {
            task.id: bool(t.facts.get("passed"))
            for task, t in zip(tasks, evaluation.trajectories, strict=True)
        }
        write_json(self.run.path / SESSIONS_BEFORE, {"texts": texts, "passed": passed})
        write_json(self.run.report_file, self.report)

    async def _evaluate(self, tasks: list[Task], name: str, parts: Parts) -> Evaluation:
        began = self.stop.elapsed_s
        self.observer.stage_begins(f"evaluation {name}", 1)
        evaluation = await evaluate_policy(
            parts.environment,
            parts.service,
            tasks,
            f"{self.config.name}-{name}",
            self.config.seed,
            self.config.engine.num_slots,
        )
        values = {
            "pass_rate": evaluation.sampled["pass_rate"],
            "greedy": evaluation.greedy["pass_rate"],
            "wall_s": self.stop.elapsed_s,
        }
        version = parts.service.current()
        self.metrics.write("evaluation", version.step if version else 0, {**values, "split": name})
        self.observer.stage_advances(1, values)
        self.observer.stage_ends()
        self._add_stage_time("evaluation_s", self.stop.elapsed_s - began)
        return evaluation

    # ---- what stays -----------------------------------------------------------------------------

    def save_latest(self, trainer: AnyTrainer, loop: ReinforcementLoop, keeper: CheckpointKeeper) -> None:
        """The resumable checkpoint of the RL stage."""
        extra = {
            "stage": "rl",
            "score": loop.reward,
            "loop": dict(loop.collector_state),
            "elapsed_s": self.stop.elapsed_s,
        }
        trainer.save(self.run.checkpoints / LATEST, extra, keeper.write)
        write_json(self.run.report_file, self.report)

    def save_curve(self, name: str, model: AnyModel) -> None:
        """A snapshot for the learning curve, with the wall time at which it was taken."""
        self._save_model(self.run.checkpoints / CURVE / name, model)
        self.metrics.write("curve", 0, {"name": name, "wall_s": self.stop.elapsed_s})

    def _save_model(self, directory: Path, model: AnyModel, tokenizer: Tokenizer | None = None) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(directory, model, write_more=tokenizer.save if tokenizer is not None else None)

    def _save_adapters(self, trainer: AnyTrainer) -> None:
        """The adapters alone, for what takes them beside its own base, if there are any."""
        if trainer.adapters is None:
            return
        base = self.config.initial_checkpoint or str(self.run.checkpoints / MIDTRAINED)
        try:
            save_peft(trainer.adapters, trainer.model, self.run.checkpoints / ADAPTER, base)
        except CheckpointError as error:
            self.observer.say(f"no adapters are written for the peft library: {error}")

    def _add_stage_time(self, name: str, seconds: float) -> None:
        stages = self.report.setdefault("stages", {})
        stages[name] = stages.get(name, 0.0) + seconds

    def _finish_report(self, tasks: list[Task], after: Evaluation, family: Evaluation) -> None:
        environment = self.run.environment
        self.report |= {
            "name": self.config.name,
            "seed": self.config.seed,
            "wall_s": self.stop.elapsed_s,
            "heldout_after": after.to_json(),
            "behaviour_after": after.behaviour,
            "first_edit_right_after": after.sampled["first_edit_right"],
            "heldout_family_after": family.to_json(),
            "machine": environment.get("machine", {}),
            "versions": environment.get("versions", {}),
            "commit": environment.get("commit", ""),
        }
        write_json(self.run.report_file, self.report)
        before = self.run.read_json(self.run.path / SESSIONS_BEFORE)
        write_json(self.run.examples_file, choose_examples(tasks, before, after))


class _Saver:
    """Saves after RL steps: the resumable checkpoint by time, curve snapshots by step."""

    def __init__(
        self, run: _Run, trainer: AnyTrainer, loop: ReinforcementLoop, keeper: CheckpointKeeper
    ) -> None:
        self._run, self._trainer, self._loop, self._keeper = run, trainer, loop, keeper

    async def __call__(self, step: int) -> None:
        settings = self._run.config.checkpoint
        if settings.curve_every_steps and step % settings.curve_every_steps == 0:
            self._run.save_curve(f"rl-{step:05d}", self._trainer.model)
        if self._keeper.due:
            self.save()

    def save(self) -> None:
        """Saves now."""
        self._run.save_latest(self._trainer, self._loop, self._keeper)
