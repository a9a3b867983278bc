import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from etude.controller.agent.folders import list_sessions, sessions_directory
from etude.controller.agent.models import ModelChoice
from etude.controller.forking import Fork, create_session, sample_fork
from etude.controller.replaying import find_task, recorded_session, replay_stored
from etude.controller.stored import Stored
from etude.errors import ConfigError, TaskError, UserError
from etude.records import Status, ToolCall, Trajectory, TrajectoryId
from etude.store import TrajectoryLog
from etude.store.comparison import compare
from etude.tasks.harbor import write_harbor
from etude_quickstart import evaluation_tasks
from tests.controller.recorded import make_run, solving, task_of
from tests.environment.stored import byte_renderer
from tests.fakes.scripted_model import write_script


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def stored(tmp_path: Path, summaries: bool = False) -> Stored:
    """The trajectory that solves its task."""
    run = make_run(tmp_path, summaries)
    return Stored(next(TrajectoryLog(run.trajectories).read()).members[0], run)


def scripted(tmp_path: Path, one: Stored, turn: int, messages: list) -> Fork:
    choice = ModelChoice(model=write_script(tmp_path / "script.json", messages))
    return Fork(turn, choice, find_task(one), backend="unisolated")


def test_a_task_is_made_again_from_the_run(tmp_path: Path) -> None:
    one = stored(tmp_path)
    assert one.config is not None
    assert find_task(one) == task_of(one.config)


def test_an_evaluation_task_is_made_again(tmp_path: Path) -> None:
    one = stored(tmp_path)
    identity = TrajectoryId("eval", "eval-heldout-0002", 0, 2, 0)
    asked = replace(one, trajectory=replace(one.trajectory, id=identity, image_digest=""))
    assert find_task(asked) == evaluation_tasks("heldout", 3)[2]


@pytest.mark.parametrize("name", ["train-0-1x", "mine", "eval-nowhere-0002", "train-7-0"])
def test_a_task_that_the_run_does_not_make_is_refused(tmp_path: Path, name: str) -> None:
    one = stored(tmp_path)
    other = replace(one.trajectory, id=replace(one.trajectory.id, task=name))
    with pytest.raises(TaskError) as raised:
        find_task(replace(one, trajectory=other))
    assert "--task" in (raised.value.fix or "")


def test_a_task_that_has_changed_is_refused(tmp_path: Path) -> None:
    one = stored(tmp_path)
    with pytest.raises(TaskError, match="differ from those"):
        find_task(replace(one, trajectory=replace(one.trajectory, image_digest="0" * 40)))


def test_a_harbor_directory_is_taken_where_there_is_no_run(tmp_path: Path) -> None:
    one = stored(tmp_path)
    alone = Stored(one.trajectory)
    with pytest.raises(TaskError, match="is unknown"):
        find_task(alone)
    write_harbor(find_task(one), tmp_path / "task")
    task = find_task(alone, tmp_path / "task")
    assert task.id == one.trajectory.id.task
    replay = asyncio.run(replay_stored(alone, task, "unisolated"))
    assert replay.equal
    assert replay.num_calls == 6


@pytest.mark.parametrize("summaries", [False, True])
def test_a_stored_trajectory_is_replayed(tmp_path: Path, summaries: bool) -> None:
    one = stored(tmp_path, summaries)
    assert (len(one.trajectory.segments) > 1) == summaries
    replay = asyncio.run(replay_stored(one, find_task(one), "unisolated"))
    assert replay.equal
    assert replay.notes == []
    assert replay.num_calls == 6


def test_a_turn_that_there_was_not_is_refused(tmp_path: Path) -> None:
    one = stored(tmp_path)
    for turn in (0, 6):
        with pytest.raises(ConfigError, match="no such turn"):
            asyncio.run(replay_stored(one, find_task(one), "unisolated", turn))


def test_another_tokenizer_makes_no_session(tmp_path: Path) -> None:
    one = stored(tmp_path)
    assert one.config is not None
    (segment,) = one.trajectory.segments
    other = replace(one.trajectory, segments=(replace(segment, tokenizer_digest="other"),))
    with pytest.raises(ConfigError) as raised:
        recorded_session(replace(one, trajectory=other), task_of(one.config), byte_renderer())
    assert raised.value.field == "tokenizer"


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_fork_has_the_same_tokens_up_to_its_turn(tmp_path: Path, turn: int) -> None:
    one = stored(tmp_path)
    assert one.config is not None
    rest = solving(task_of(one.config))[turn:]
    messages = [*[["unused"]] * turn, (ToolCall("list_dir", {"path": "lib"}),), *rest]
    forked, replay = asyncio.run(sample_fork(one, scripted(tmp_path, one, turn, messages)))
    assert replay.equal
    assert replay.num_turns == turn
    found = compare(one.trajectory, forked).divergence
    assert found is not None
    assert found.turn == turn + 1
    assert str(forked.id) == f"demo+fork{turn}/{one.trajectory.id.task}/e0/g0/0"
    assert {segment.trajectory_id for segment in forked.segments} == {str(forked.id)}
    assert forked.facts["forked_from"] == str(one.trajectory.id)
    assert forked.status is Status.DONE
    assert forked.reward is not None
    assert forked.reward.task == 1.0


@pytest.mark.parametrize(
    ("turn", "message"), [(3, "another summary"), (4, ToolCall("list_dir", {"path": "tests"}))]
)
def test_a_chain_is_forked_before_and_after_its_summary(
    tmp_path: Path, turn: int, message: str | ToolCall
) -> None:
    one = stored(tmp_path, summaries=True)
    assert [len(made.calls) for made in one.trajectory.turns] == [1, 1, 2, 0, 1, 1]
    messages = [*[["unused"]] * turn, [message], [ToolCall("run_tests")], [ToolCall("finish")]]
    forked, _ = asyncio.run(sample_fork(one, scripted(tmp_path, one, turn, messages)))
    assert len(forked.segments) == 2
    assert forked.segments[1].parent == (forked.segments[0].id, len(forked.segments[0].tokens))
    compared = compare(one.trajectory, forked)
    assert compared.common_turns == turn
    assert compared.outcome == {}


def test_a_fork_that_goes_on_as_before_is_the_same_session(tmp_path: Path) -> None:
    one = stored(tmp_path)
    assert one.config is not None
    fork = scripted(tmp_path, one, 3, solving(task_of(one.config)))
    forked, _ = asyncio.run(sample_fork(one, fork))
    assert compare(one.trajectory, forked).equal
    assert np.array_equal(forked.segments[0].tokens, one.trajectory.segments[0].tokens)


def test_a_session_that_had_ended_cannot_go_on(tmp_path: Path) -> None:
    one = stored(tmp_path)
    with pytest.raises(ConfigError, match="had ended"):
        asyncio.run(sample_fork(one, scripted(tmp_path, one, 5, [])))


@pytest.mark.parametrize("summaries", [False, True])
def test_a_fork_is_handed_over_as_a_session_with_its_workspace(tmp_path: Path, summaries: bool) -> None:
    one = stored(tmp_path, summaries)
    assert one.config is not None
    task = task_of(one.config)
    turn = 4 if summaries else 3
    handed = asyncio.run(create_session(one, scripted(tmp_path, one, turn, []), tmp_path / "mine"))
    path = str(task.metadata["path"])
    assert (handed.directory / path).read_text() == task.solution_files[path]
    names = {item.relative_to(handed.directory).as_posix() for item in handed.directory.rglob("*.py")}
    assert names == set(task.files)
    (meta,) = list_sessions(sessions_directory())
    assert (meta.id, meta.path) == (handed.session, str(tmp_path / "mine"))
    assert meta.test_paths == task.test_paths
    assert any(".etude" in note for note in handed.replay.notes) == summaries


def test_a_fork_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    one = stored(tmp_path)
    (segment,) = one.trajectory.segments
    tokens = segment.tokens.copy()
    tokens[0] += 1
    damaged: Trajectory = replace(one.trajectory, segments=(replace(segment, tokens=tokens),))
    with pytest.raises(ConfigError, match="other tokens"):
        asyncio.run(
            create_session(
                replace(one, trajectory=damaged), scripted(tmp_path, one, 2, []), tmp_path / "mine"
            )
        )
    assert list_sessions(sessions_directory()) == []
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 1, 3, 6, 10, 20, 40, 80])
def test_a_fork_that_is_cancelled_leaves_nothing_behind(tmp_path: Path, steps: int) -> None:
    one = stored(tmp_path)
    fork = scripted(tmp_path, one, 4, [])

    async def cancel() -> bool:
        task = asyncio.create_task(create_session(one, fork, tmp_path / "mine"))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    cancelled = asyncio.run(cancel())
    assert len(list_sessions(sessions_directory())) == (not cancelled)
    assert (tmp_path / "mine").exists() == (not cancelled)
    assert not list(tmp_path.glob(".mine-*"))


def test_a_directory_that_holds_something_is_not_written_into(tmp_path: Path) -> None:
    one = stored(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").write_text("mine")
    with pytest.raises(ConfigError) as raised:
        asyncio.run(create_session(one, scripted(tmp_path, one, 2, []), tmp_path / "mine"))
    assert raised.value.field == "--into"
    assert [item.name for item in (tmp_path / "mine").iterdir()] == ["work.txt"]
    assert list_sessions(sessions_directory()) == []


def test_imported_words_cannot_be_forked(tmp_path: Path) -> None:
    one = stored(tmp_path)
    bare = tuple(replace(turn, start=0, end=0) for turn in one.trajectory.turns)
    with pytest.raises(UserError, match="no sampled tokens"):
        asyncio.run(
            sample_fork(
                replace(one, trajectory=replace(one.trajectory, turns=bare)),
                scripted(tmp_path, one, 2, []),
            )
        )
