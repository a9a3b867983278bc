"""In which order processes are killed."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.inside import processes
from etude.sandbox.inside.processes import Process, Table, kill_all_but, parents_first

TABLES = st.dictionaries(
    st.integers(2, 20), st.builds(Process, st.integers(0, 20), st.just(0), st.just("S")), max_size=12
)
"""Any parents, and so circles, too."""


@given(TABLES, st.data())
def test_every_process_comes_once(table: Table, data: st.DataObject) -> None:
    pids = data.draw(st.sets(st.sampled_from(sorted(table)))) if table else set[int]()
    assert sorted(parents_first(table, pids)) == sorted(pids)


@given(st.lists(st.integers(0, 10**6), max_size=30), st.randoms(use_true_random=False))
def test_parents_come_before_their_children(draws: list[int], rng: random.Random) -> None:
    names = list(range(100, 101 + len(draws)))
    rng.shuffle(names)
    table = {names[0]: Process(1, 0, "S")}
    for number, draw in enumerate(draws, start=1):
        table[names[number]] = Process(names[draw % number], 0, "S")
    order = parents_first(table, table)
    place = {pid: number for number, pid in enumerate(order)}
    assert all(row.parent not in place or place[row.parent] < place[pid] for pid, row in table.items())


class Shells:
    """A Processes: shells, each with the command that it waits for."""

    def __init__(self, count: int, directory: Path) -> None:
        self.shells = [
            subprocess.Popen(["/bin/sh", "-c", f"sleep 600; echo > after-{number}"], cwd=directory)
            for number in range(count)
        ]

    def table(self) -> Table:
        """See Processes.table."""
        everything, shells = processes.read_table(), [shell.pid for shell in self.shells]
        return {pid: everything[pid] for pid in processes.descendants(everything, shells).union(shells)}

    def kill_all(self) -> None:
        """See Processes.kill_all."""
        kill_all_but(self, lambda table: set())


def test_a_killed_shell_does_not_go_on_with_its_next_command(tmp_path: Path) -> None:
    all_of = Shells(20, tmp_path)
    try:
        while len(all_of.table()) < 40:
            assert all(shell.poll() is None for shell in all_of.shells)
    finally:
        all_of.kill_all()
    assert [shell.wait(60) for shell in all_of.shells] == [-9] * 20
    assert not list(tmp_path.iterdir())
