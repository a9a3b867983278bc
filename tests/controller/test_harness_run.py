"""Whole runs whose sessions a foreign agent plays."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from etude.config import RunConfig
from etude.controller.starting import check_start
from etude.errors import ConfigError, InfrastructureError
from etude.observe.metrics import read_metrics
from etude.records import Status
from etude.store.trajectories import TrajectoryLog
from etude.tasks import write_harbor
from tests.cli.commands import etude
from tests.controller.running import run_here, tiny_config
from tests.environment.playing import TASK

ASK_ONCE = textwrap.dedent(
    """
    import json, os, urllib.request
    body = {"messages": [{"role": "user", "content": os.environ["ETUDE_INSTRUCTION"]}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())))
    if len(answer["choices"][0]["message"]["content"].encode()) % 2:
        open("lib/tally.py", "w").write("def tally(xs):\\n    return sum(xs)\\n")
    """
)
"""An agent that solves its task if the model's answer has an odd length: a model that has learnt nothing
then earns 1 about as often as 0."""


def harness_config(directory: Path, command: str = f"python3 -c '{ASK_ONCE}'", **sections: Any) -> RunConfig:
    for number in range(4):
        task = replace(TASK, id=f"tally-{number}")
        write_harbor(task, directory / "tasks" / task.id)
    agent = {"harness": {"command": command, "timeout_s": 60, "max_running": 8}}
    tasks = {"family": "directory", "directory": str(directory / "tasks")}
    rl = {"group_size": 4, "max_refill_rounds": 3}
    return tiny_config(directory / "runs", agent=agent, tasks=tasks, rl=rl, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_foreign_agents_sessions_train_the_weights_that_sample_the_next(
    tmp_path: Path, max_staleness: int
) -> None:
    config = harness_config(tmp_path)
    config = config.model_copy(update={"rl": config.rl.model_copy(update={"max_staleness": max_staleness})})
    run, report = run_here(config)
    assert report["rl_steps"] == 2 and "heldout_after" in report
    steps = [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
    assert all(row["trained_groups"] >= 1 and row["infrastructure_failures"] == 0 for row in steps)
    assert steps[0]["parity_k3"] < 1e-3, "the trainer computes what was recorded"
    groups = list(TrajectoryLog(run.trajectories).read())
    rewards = [{m.reward.task for m in group.members if m.reward} for group in groups]
    assert {0.0, 1.0} in rewards
    versions = {m.oldest_version.step for group in groups for m in group.members if m.oldest_version}
    assert versions >= {0, 1}, "the weights are those of the run as it goes on"
    assert all(m.status is Status.DONE for group in groups for m in group.members)


@pytest.mark.slow
def test_a_command_that_never_asks_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="sessions failed") as caught:
        run_here(harness_config(tmp_path, "no-such-agent"))
    assert "never had an answer" in str(caught.value) and "exit 127" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("sandbox.server", {"sandbox": {"server": "http://127.0.0.1:1"}}),
        ("rl.forks.share", {"rl": {"forks": {"share": 0.5}}}),
        ("agent.harness.directory", {"sandbox": {"backend": "gvisor"}, "agent": {"directory": "/opt/agent"}}),
        ("agent.harness.command", {"agent": {"command": "  "}}),
    ],
)
def test_what_a_foreign_agent_cannot_have_is_refused_by_name(field: str, sections: dict[str, Any]) -> None:
    harness = {"command": "agent", **sections.pop("agent", {})}
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({**sections, "agent": {"harness": harness}})
    assert field.rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize(
    ("field", "agent"),
    [
        ("agent.mcp", {"mcp": {"notes": {"command": "notes token-of-mine"}}}),
        ("agent.index", {"index": "words"}),
    ],
)
def test_tools_of_our_own_agent_are_refused_with_a_foreign_one(field: str, agent: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"agent": {"harness": {"command": "agent"}, **agent}})
    (error,) = caught.value.errors()
    assert f"{field}: must not be set" in error["msg"] and "has its own tools" in error["msg"]
    assert "token-of-mine" not in error["msg"]


@pytest.mark.parametrize("directory", ["/etc", "/nowhere", str(Path.home())])
def test_a_directory_that_sandboxes_cannot_be_shown_is_refused_before_the_run(
    tmp_path: Path, directory: str
) -> None:
    config = harness_config(tmp_path, "agent")
    harness = config.agent.harness.model_copy(update={"directory": directory})
    config = config.model_copy(update={"agent": config.agent.model_copy(update={"harness": harness})})
    with pytest.raises(ConfigError) as caught:
        check_start(config)
    assert (caught.value.field, caught.value.received) == ("agent.harness.directory", directory)


def test_the_command_is_named_on_the_command_line() -> None:
    done = etude("train", "--config", "configs/quickstart.toml", "--harness", "")
    assert done.exit_code == 2 and "--harness" in done.stderr and "needs a command" in done.stderr
