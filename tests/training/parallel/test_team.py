"""A team of ranks: calls, errors that all share, ranks that die or hang."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.config.parallel import ParallelConfig
from etude.errors import ConfigError, RankError
from etude.training.parallel.mesh_ranks import MeshRanks
from etude.training.parallel.team import Team

DEADLINE_S = 90.0


class Counter:
    """Counts on every rank, and does whatever else a test needs."""

    def __init__(self, ranks: MeshRanks, start: int) -> None:
        self.ranks = ranks
        self.total = start

    def add(self, amount: int) -> tuple[int, float]:
        self.total += amount
        return self.total, float(self.ranks.all_reduce_(torch.tensor([float(self.ranks.rank + 1)])))

    def refuse(self) -> None:
        raise ConfigError("is refused", field="everywhere")

    def refuse_on(self, rank: int) -> None:
        if self.ranks.rank == rank:
            raise ConfigError("is refused", field="somewhere")
        self.add(0)

    def die_on(self, rank: int) -> None:
        if self.ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        self.add(0)

    def hang_on(self, rank: int) -> None:
        if self.ranks.rank == rank:
            time.sleep(600)
        self.add(0)


def _team(timeout_s: float = 120.0) -> Team[Any]:
    team = Team.spawn(ParallelConfig(ranks=2, timeout_s=timeout_s))
    team.make(Counter, 5)
    return team


@pytest.fixture
def team() -> Iterator[Team[Any]]:
    made = _team()
    yield made
    made.close()


@pytest.mark.slow
def test_every_rank_does_what_the_lead_does_and_an_error_of_all_ends_nothing(team: Team[Any]) -> None:
    assert team.call(Counter.add, 2) == (7, 3.0)
    with pytest.raises(ConfigError, match="everywhere"):
        team.call(Counter.refuse)
    assert team.call(Counter.add, 1) == (8, 3.0)
    team.close()
    team.close()
    with pytest.raises(RankError):
        team.call(Counter.add, 1)


@pytest.mark.slow
def test_what_ranks_have_told_each_other_is_not_kept_for_good(team: Team[Any]) -> None:
    def num_kept_after(num_calls: int) -> int:
        for _ in range(num_calls):
            team.call(Counter.add, 1)
        return team._member.store.num_keys()

    assert num_kept_after(4) == num_kept_after(20)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_ends_the_team(team: Team[Any], rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(RankError):
        team.call(Counter.refuse_on, rank)
    assert time.monotonic() - began < DEADLINE_S
    assert not any(process.is_alive() for process in team._processes)
    with pytest.raises(RankError):
        team.call(Counter.add, 1)


@pytest.mark.slow
def test_a_killed_rank_ends_the_team_at_once_and_is_named(team: Team[Any]) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1 ended with code -9"):
        team.call(Counter.die_on, 1)
    assert time.monotonic() - began < DEADLINE_S


@pytest.mark.slow
def test_a_rank_killed_between_two_calls_is_noticed_at_the_next(team: Team[Any]) -> None:
    os.kill(team._processes[0].pid or 0, signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 ended with code -9"):
        team.call(Counter.add, 1)


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_after_the_timeout() -> None:
    team = _team(timeout_s=15.0)
    began = time.monotonic()
    with pytest.raises(RankError):
        team.call(Counter.hang_on, 1)
    assert 14.0 < time.monotonic() - began < 15.0 + DEADLINE_S
    assert not any(process.is_alive() for process in team._processes)


LEAD = """
import os, sys
from etude.config.parallel import ParallelConfig
from etude.training.parallel.team import Team
from tests.training.parallel.test_team import Counter
if __name__ == "__main__":
    team = Team.spawn(ParallelConfig(ranks=3, timeout_s=20.0))
    team.make(Counter, 5)
    print(*[process.pid for process in team._processes], flush=True)
    if sys.argv[1] == "idle":
        sys.stdin.read()
    team.call(Counter.hang_on, 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["idle", "busy"])
def test_the_others_end_when_the_lead_is_killed(tmp_path: Path, doing: str) -> None:
    """One that waits for a rank that hangs sees it when its time is up; the one that hangs, on its return."""
    script = tmp_path / "lead.py"
    script.write_text(LEAD)
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    lead = subprocess.Popen(
        [sys.executable, str(script), doing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert lead.stdout is not None
    first, second = map(int, lead.stdout.readline().split())
    time.sleep(1.0)
    lead.kill()
    lead.wait()
    try:
        _assert_ends(first)
        if doing == "idle":
            _assert_ends(second)
    finally:
        for pid in (first, second):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


STOPPED = """
import signal, time
from etude.config.parallel import ParallelConfig
from etude.training.parallel.team import Team
from tests.training.parallel.test_team import Counter
if __name__ == "__main__":
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    team = Team.spawn(ParallelConfig(ranks=2, timeout_s=60.0))
    team.make(Counter, 5)
    print("made", flush=True)
    while not heard:  # pause() would miss a signal that comes before it
        time.sleep(0.01)
    print(*team.call(Counter.add, 1), flush=True)
    {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["team.close()", "raise SystemExit"])
def test_what_stops_a_whole_process_group_is_for_the_lead_alone(tmp_path: Path, end: str) -> None:
    """As Slurm stops a job; the lead ends its step, and the other ranks end with it."""
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED.format(end=end))
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    lead = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,
    )
    try:
        assert lead.stdout is not None and lead.stdout.readline() == "made\n"
        os.killpg(lead.pid, signal.SIGTERM)
        told, _ = lead.communicate(timeout=DEADLINE_S)
        assert (told, lead.returncode) == ("6 3.0\n", 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(lead.pid, signal.SIGKILL)
        lead.communicate()


def _assert_ends(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.1)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


JOINED = """
import os, sys
from etude.config.parallel import ParallelConfig
from etude.training.parallel.team import Team
from tests.training.parallel.test_team import Counter
if __name__ == "__main__":
    config = ParallelConfig(ranks=2, timeout_s=60.0)
    if os.environ["RANK"] == "1":
        Team.follow(config)
    else:
        team = Team.join(config)
        team.make(Counter, 5)
        print("made", flush=True)
        sys.stdin.readline()
        print(*team.call(Counter.add, 1), flush=True)
        team.close()
"""


@pytest.mark.slow
def test_what_stops_a_run_is_for_the_lead_alone_where_torchrun_hands_it_to_all(tmp_path: Path) -> None:
    script = tmp_path / "joined.py"
    script.write_text(JOINED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    known = os.environ | {"PYTHONPATH": paths, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=known | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        lead, follower = ranks
        assert lead.stdout is not None and lead.stdout.readline() == "made\n"
        for number in (signal.SIGINT, signal.SIGTERM):
            follower.send_signal(number)
        told, _ = lead.communicate("\n", timeout=DEADLINE_S)
        assert told == "6 3.0\n"
        assert [lead.wait(), follower.wait(DEADLINE_S)] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
