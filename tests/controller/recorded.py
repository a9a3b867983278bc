"""A run directory with the trajectories of scripted agents on the tasks that its configuration generates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from etude.agent import SessionLimits, SummaryPolicy
from etude.config import RunConfig, parse_config
from etude.observe import RunDirectory
from etude.records import Group, Task, ToolCall, Trajectory, TrajectoryId
from etude.store import TrajectoryLog
from etude_quickstart import TaskGenerator
from tests.environment.stored import Message, byte_renderer, record

LIST, TEST, FINISH = ToolCall("list_dir"), ToolCall("run_tests"), ToolCall("finish")


def task_of(config: RunConfig, number: int = 0) -> Task:
    return TaskGenerator(config.seed, "train", config.rl.level_weights).task(number)


def solving(task: Task) -> list[Message]:
    """Looks, mends the line that is wrong, tests and finishes."""
    path, line = str(task.metadata["path"]), int(task.metadata["line"])
    text = task.solution_files[path].split("\n")[line - 1]
    edit = ToolCall("edit_lines", {"path": path, "start": str(line), "text": text})
    read = ToolCall("read_file", {"path": path})
    return [(LIST,), (read,), (read, edit), (TEST,), (FINISH,)]


def giving_up() -> list[Message]:
    return [(LIST,), (FINISH,)]


def make_run(tmp_path: Path, summaries: bool = False) -> RunDirectory:
    """A run `demo` with two trajectories of one task: one solves it, one gives up."""
    agent = {"max_turns": 12, "max_tokens": 2048, "max_message_tokens": 512}
    if summaries:
        agent |= {"summary_at_tokens": 350, "max_summary_tokens": 64}
    config = parse_config(
        {
            "name": "demo",
            "runs_directory": str(tmp_path / "runs"),
            "agent": agent,
            "model": {"max_positions": 2048},
        }
    )
    run = RunDirectory.create(config)
    byte_renderer().tokenizer.save(run.path / "tokenizer")
    task = task_of(config)
    members = [
        trajectory_of(config, task, index, messages)
        for index, messages in enumerate((solving(task), giving_up()))
    ]
    TrajectoryLog(run.trajectories).append([Group("demo/g0", "task", 2, tuple(members))])
    return run


def trajectory_of(config: RunConfig, task: Task, index: int, messages: Sequence[Message]) -> Trajectory:
    agent = config.agent
    summary = None
    if agent.summary_at_tokens:
        summary = SummaryPolicy(
            agent.summary_at_tokens,
            agent.max_summary_tokens,
            agent.summary_jitter,
            agent.max_summaries,
            agent.summary_request,
        )
    limits = SessionLimits(
        max_turns=agent.max_turns,
        max_calls_per_turn=agent.max_calls_per_turn,
        max_tokens=agent.max_tokens,
        max_message_tokens=agent.max_message_tokens,
        max_session_tokens=agent.max_session_tokens or None,
    )
    identity = TrajectoryId(config.name, task.id, 0, 0, index)
    return record(task, messages, identity, summary, limits)
