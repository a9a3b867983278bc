"""Evaluations within a run, on held-out tasks before and after reinforcement learning, for its report."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.config import RunConfig
from etude.controller.families import TaskFamily
from etude.controller.parts import Parts
from etude.controller.stopping import StopSignal
from etude.evaluation import Evaluation, evaluate_family, evaluate_masked, evaluate_policy
from etude.evaluation.acting import MASKED_SAMPLES
from etude.evaluation.sessions import OnEnd
from etude.kit.durable import write_json
from etude.observe import MetricSink, Observer, RunDirectory, show_stage
from etude.protocols import Handle, Trainer
from etude.records import Task, Trajectory


def session_text(trajectory: Trajectory) -> str:
    """A session as readable text: each message, then the tools' outputs."""
    lines: list[str] = []
    for number, turn in enumerate(trajectory.turns, 1):
        lines.append(f"[{number}] {turn.text.removesuffix('<|end|>').strip()}")
        lines += [f"    {line}" for result in turn.results for line in result.output.splitlines()]
    verdict = "passes the hidden tests" if trajectory.facts.get("passed") else "fails the hidden tests"
    lines.append(f"-> {trajectory.status.value}, {verdict}")
    return "\n".join(lines)


def choose_examples(
    tasks: Sequence[Task], before: Mapping[str, Any] | None, after: Evaluation, count: int = 2
) -> list[dict[str, str]]:
    """Tasks failed before and solved after, at most one per level, those with parallel calls first."""
    texts: Mapping[str, str] = (before or {}).get("texts", {})
    passed: Mapping[str, bool] = (before or {}).get("passed", {})
    pairs = [
        (task, trajectory)
        for task, trajectory in zip(tasks, after.trajectories, strict=True)
        if trajectory.facts.get("passed") and task.id in texts and not passed.get(task.id, False)
    ]
    pairs.sort(key=lambda pair: -int(pair[1].facts.get("parallel_turns", 0)))
    chosen: dict[object, dict[str, str]] = {}
    for task, trajectory in pairs:
        level = task.metadata.get("level")
        if level not in chosen:
            chosen[level] = {
                "task": task.id,
                "title": f"{task.instruction} (level {level}, {task.metadata.get('bug_kind')})",
                "before": texts[task.id],
                "after": session_text(trajectory),
            }
    return list(chosen.values())[:count]


SESSIONS_BEFORE = "sessions_before.json"
"""File of the mid-trained model's sessions, for the examples of before and after."""


def add_stage_time(report: dict[str, Any], name: str, seconds: float) -> None:
    """Adds to the time of a stage, which includes earlier processes."""
    stages = report.setdefault("stages", {})
    stages[name] = stages.get(name, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class Judging:
    """Evaluations of one process of a run. Adds their results to the run's report."""

    config: RunConfig
    """Resolved."""
    run: RunDirectory
    metrics: MetricSink
    observer: Observer
    stop: StopSignal
    """The run's clock."""
    report: dict[str, Any]
    """Changed in place; some methods write it."""

    async def judge(
        self, tasks: Sequence[Task], name: str, parts: Parts, num_repeated: int = 0
    ) -> Evaluation:
        """Evaluates the weights in service. `num_repeated`: number of tasks that are played several times.

        Raises InfrastructureError if most sessions failed.
        """
        num_samples, num_repeated = self.config.evaluation.num_samples, min(num_repeated, len(tasks))
        num_sessions = 2 * len(tasks) + (num_samples - 1) * num_repeated
        with self._show_stage(f"evaluation {name.replace('_', ' ')}", num_sessions) as on_end:
            evaluation = await evaluate_policy(
                parts.environment,
                parts.service,
                tasks,
                f"{self.config.name}-{name}",
                self.config.seed,
                self.config.engine.num_slots,
                num_samples,
                num_repeated,
                on_end,
            )
            values = {
                "pass_rate": evaluation.sampled["pass_rate"],
                "greedy": evaluation.greedy["pass_rate"],
                "wall_s": self.stop.elapsed_s,
            }
            version = parts.service.current()
            self.metrics.write("evaluation", version.step if version else 0, {**values, "split": name})
            self.observer.stage_advances(num_sessions, values)
        return evaluation

    @contextlib.contextmanager
    def _show_stage(self, title: str, num_sessions: int) -> Iterator[OnEnd]:
        """Shows a stage, adds its time to the report; yields the callback for each session that ends."""
        began, counted = self.stop.elapsed_s, itertools.count(1)
        with show_stage(self.observer, title, num_sessions, "session") as advance:
            yield lambda trajectory: advance(next(counted))
        add_stage_time(self.report, "evaluation_s", self.stop.elapsed_s - began)

    async def judge_before(
        self,
        tasks: Sequence[Task],
        others: Sequence[Task],
        family: TaskFamily,
        trainer: Handle[Trainer],
        parts: Parts,
    ) -> None:
        """Evaluates the mid-trained model and writes the report; skips what an earlier process has done.
        `others`: tasks of families that are never trained on."""
        judged = self.report.get("families", {})
        lacks_families = any("before" not in judged.get(kind.name, {}) for kind in family.acting)
        if "heldout_before" in self.report and not lacks_families:
            return
        manifest = await trainer.call(Trainer.publish)
        await parts.service.stage(manifest)
        await parts.service.activate(manifest.version)
        if "heldout_before" not in self.report:
            await self._judge_heldout_before(tasks, others, parts)
        await self.judge_families(family, "before", parts)

    async def _judge_heldout_before(
        self, tasks: Sequence[Task], others: Sequence[Task], parts: Parts
    ) -> None:
        evaluation = await self.judge(tasks, "before", parts, self.config.evaluation.num_repeated_tasks)
        if others:
            judged = await self.judge(others, "family_before", parts)
            self.report["heldout_family_before"] = judged.to_json()
        self.report.update(_figures(evaluation, "before"))
        sessions = list(zip(tasks, evaluation.trajectories, strict=True))
        texts = {task.id: session_text(session) for task, session in sessions}
        passed = {task.id: bool(session.facts.get("passed")) for task, session in sessions}
        write_json(self.run.path / SESSIONS_BEFORE, {"texts": texts, "passed": passed})
        self.run.write_report(self.report)

    async def judge_families(self, family: TaskFamily, when: str, parts: Parts) -> None:
        """Evaluates the families that only acting solves, and writes the report; skips what an earlier
        process has done. `when`: "before" or "after" reinforcement learning."""
        settings, slots = self.config.evaluation, self.config.engine.num_slots
        found: dict[str, dict[str, Any]] = self.report.setdefault("families", {}) if family.acting else {}
        for kind in family.acting:
            name = kind.name
            sides = found.setdefault(name, {})
            if when in sides:
                continue
            tasks = family.evaluation_tasks(f"{name}_heldout", settings.num_acting_tasks)
            label, playing = f"{self.config.name}-{name}-{when}", (parts.environment, parts.service)
            seed, samples = self.config.seed, settings.num_samples
            num_sessions = len(tasks) * (1 + samples + (MASKED_SAMPLES if kind.mask is not None else 0))
            with self._show_stage(f"evaluation {name} {when}", num_sessions) as on_end:
                sides[when] = await evaluate_family(*playing, tasks, label, seed, slots, samples, on_end)
                if kind.mask is not None:
                    masked = [kind.mask(task) for task in tasks]
                    sides[when] |= await evaluate_masked(
                        *playing, masked, kind.ceiling, f"{label}-masked", seed, slots, on_end
                    )
                rate = sides[when]["sampled"]["pass_rate"]
                self.observer.stage_advances(num_sessions, {"pass_rate": rate})
        self.run.write_report(self.report)

    def finish(self, tasks: Sequence[Task], after: Evaluation, family: Evaluation | None) -> None:
        """Writes the report with the trained model's figures, and examples of its sessions. `family`: results
        on tasks of families that were never trained on."""
        self.report.update(
            {
                "name": self.config.name,
                "seed": self.config.seed,
                "wall_s": self.stop.elapsed_s,
                **_figures(after, "after"),
                **self.run.origin,
            }
        )
        if family is not None:
            self.report["heldout_family_after"] = family.to_json()
        write_json(self.run.report_file, self.report)
        before = self.run.read_json(self.run.path / SESSIONS_BEFORE)
        write_json(self.run.examples_file, choose_examples(tasks, before, after))


def _figures(evaluation: Evaluation, when: str) -> dict[str, Any]:
    return {
        f"heldout_{when}": evaluation.to_json(),
        f"behaviour_{when}": evaluation.behaviour,
        f"first_edit_right_{when}": evaluation.sampled["first_edit_right"],
        **{f"{name}_{when}": figure for name, figure in evaluation.pass_at_k.items()},
    }
