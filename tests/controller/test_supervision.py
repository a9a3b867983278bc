import asyncio
import errno
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import ClusterConfig
from etude.controller.local import LocalHandle
from etude.controller.supervision import (
    KIND,
    FaultJournal,
    StartFailures,
    SupervisedParts,
    Supervision,
    Supervisor,
)
from etude.errors import CheckpointError, PartLostError
from etude.observe.metrics import MemorySink
from etude.observe.observer import RecordingObserver
from etude.protocols import Handle

FAST = ClusterConfig(heartbeat_s=0.01, silent_s=30.0, backoff_s=0.0, healthy_s=60.0, give_up_after=3)


class Part:
    """Answers heartbeats until it is told not to."""

    def __init__(self) -> None:
        self.well, self.silent, self.closed = True, False, False
        self.is_waited_for = False

    async def pulse(self) -> str:
        if self.silent:
            self.is_waited_for = True
            await asyncio.Event().wait()
        if not self.well:
            raise RuntimeError("unwell")
        return "well"

    async def close(self) -> None:
        self.closed = True


class PlacedHandle(LocalHandle[Part]):
    """On a machine of a name."""

    def __init__(self, part: Part, node: str) -> None:
        super().__init__(part)
        self.node = node


class Bench:
    """A supervisor over parts of this process, and what happened."""

    def __init__(self, settings: ClusterConfig = FAST, nodes: str = "") -> None:
        self.parts: list[Part] = []
        self.avoided: list[frozenset[str]] = []
        self.failing: list[Exception] = []
        """What the next preparations raise."""
        self.metrics, self.observer = MemorySink(), RecordingObserver()
        self.journal = FaultJournal(self.metrics, self.observer)
        self.health = Supervision(settings, self.journal)
        self.losses: list[str] = []
        self.pulses: list[Any] = []
        self._nodes = nodes
        self.supervisor = Supervisor(
            "part",
            self._spawn,
            self._prepare,
            self.health,
            self.losses.append,
            self.pulses.append,
        )

    async def _spawn(self, avoid: frozenset[str]) -> Handle[Any]:
        self.avoided.append(avoid)
        self.parts.append(Part())
        node = next((node for node in self._nodes if node not in avoid), "")
        return PlacedHandle(self.parts[-1], node)

    async def _prepare(self, handle: Handle[Any]) -> None:
        if self.failing:
            raise self.failing.pop(0)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for a condition."""
        async with asyncio.timeout(60.0):
            while not holds():  # noqa: ASYNC110 (nobody tells of it)
                await asyncio.sleep(0.002)


@pytest.mark.parametrize("harm", ["killed", "unwell", "silent", "given up"])
def test_a_part_that_fails_is_replaced_by_one_that_is_prepared(harm: str) -> None:
    async def run() -> Bench:
        bench = Bench()
        await bench.supervisor.start()
        first = await bench.supervisor.ready()
        await bench.until(lambda: "well" in bench.pulses)
        if harm == "killed":
            first.kill()
        elif harm == "unwell":
            bench.parts[0].well = False
        elif harm == "silent":
            bench.parts[0].silent = True
            await bench.until(lambda: bench.parts[0].is_waited_for)
            loop = asyncio.get_running_loop()
            clock = loop.time
            loop.time = lambda: clock() + FAST.silent_s  # type: ignore[method-assign]
        else:
            bench.supervisor.declare_lost(first, "somebody's word")
        await bench.until(lambda: bench.supervisor.handle not in (first, None))
        with pytest.raises(PartLostError, match="was killed"):
            await first.call(Part.pulse)
        assert await (await bench.supervisor.ready()).call(Part.pulse) == "well"
        await bench.supervisor.close()
        return bench

    bench = asyncio.run(run())
    assert bench.journal.counts == {"lost": 1, "restarted": 1}
    assert [row["mode"] for row in bench.metrics.rows if row["kind"] == KIND] == ["lost", "restarted"]
    assert len(bench.losses) == 1
    assert [part.closed for part in bench.parts] == [False, True]


def test_nobody_gets_a_part_before_it_is_prepared_however_many_starts_that_takes() -> None:
    async def run() -> Bench:
        bench = Bench(FAST.model_copy(update={"give_up_after": 4}))
        await bench.supervisor.start()
        first = await bench.supervisor.ready()
        bench.failing = [CheckpointError("not yet"), PartLostError("nor now")]
        first.kill()
        await bench.until(lambda: bench.supervisor.handle is not first)
        second = await bench.supervisor.ready(60.0)
        assert second is not first
        await bench.supervisor.close()
        return bench

    bench = asyncio.run(run())
    assert bench.journal.counts == {"lost": 1, "not started": 2, "restarted": 1}


@pytest.mark.parametrize("fault", [PartLostError("again"), ZeroDivisionError("ours")])
def test_a_part_is_given_up_after_failures_in_a_row_or_a_fault_of_ours(fault: Exception) -> None:
    async def run() -> Bench:
        bench = Bench()
        await bench.supervisor.start()
        bench.failing = [fault] * 10
        (await bench.supervisor.ready()).kill()
        await bench.until(lambda: bench.supervisor.failure is not None)
        with pytest.raises(PartLostError, match="will not be started again"):
            await bench.supervisor.ready()
        await bench.supervisor.close()
        return bench

    bench = asyncio.run(run())
    tries = FAST.give_up_after if isinstance(fault, PartLostError) else 1 + 1
    assert len(bench.parts) == tries
    assert bench.journal.counts["given up"] == 1


@pytest.mark.parametrize("event", ["lost", "restarted"])
def test_who_waits_for_a_part_is_told_where_a_full_disk_takes_no_row_of_what_befell_it(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        bench = Bench()

        def write(kind: str, step: int, values: Mapping[str, float | str]) -> None:
            if values["mode"] == event:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(bench.metrics, "write", write)
        await bench.supervisor.start()
        (await bench.supervisor.ready()).kill()
        await bench.until(lambda: bench.supervisor.failure is not None)
        with pytest.raises(PartLostError, match=r"will not be started again.*No space left"):
            await bench.supervisor.ready()
        await bench.supervisor.close()

    asyncio.run(run())


def test_what_is_wrong_at_the_first_start_is_raised_at_once() -> None:
    async def run() -> None:
        bench = Bench()
        bench.failing = [CheckpointError("damaged")]
        with pytest.raises(CheckpointError, match="damaged"):
            await bench.supervisor.start()
        assert len(bench.parts) == 1
        await bench.supervisor.close()

    asyncio.run(run())


def test_a_process_that_dies_while_it_starts_for_the_first_time_is_replaced() -> None:
    async def run() -> None:
        bench = Bench()
        bench.failing = [PartLostError("died"), PartLostError("died")]
        await bench.supervisor.start()
        assert await (await bench.supervisor.ready()).call(Part.pulse) == "well"
        await bench.supervisor.close()
        hopeless = Bench()
        hopeless.failing = [PartLostError("died")] * 9
        with pytest.raises(PartLostError, match="failed 3 times in a row"):
            await hopeless.supervisor.start()
        assert len(hopeless.parts) == FAST.give_up_after

    asyncio.run(run())


def test_waiting_for_a_part_is_bounded() -> None:
    async def run() -> None:
        bench = Bench(FAST.model_copy(update={"backoff_s": 60.0, "most_backoff_s": 60.0}))
        await bench.supervisor.start()
        (await bench.supervisor.ready()).kill()
        await bench.until(lambda: bench.supervisor.handle is None)
        with pytest.raises(PartLostError, match=r"did not come back within 0 s.*patience_s"):
            await bench.supervisor.ready(0.01)
        await bench.supervisor.close()

    asyncio.run(run())


def test_a_machine_on_which_parts_fail_is_avoided_for_a_while() -> None:
    now = [0.0]
    journal = FaultJournal(MemorySink(), RecordingObserver())
    health = Supervision(ClusterConfig(quarantine_after=2, quarantine_s=100.0), journal, lambda: now[0])
    health.record_failure("a")
    now[0] = 101.0
    health.record_failure("a")
    assert health.quarantined() == frozenset(), "the first failure is long past"
    now[0] = 150.0
    health.record_failure("a")
    health.record_failure("b")
    health.record_failure("")
    health.record_failure("")
    assert health.quarantined() == {"a"}
    assert journal.counts == {"quarantined": 1}
    now[0] = 251.0
    assert health.quarantined() == frozenset()


def test_a_part_is_started_elsewhere_once_its_machine_is_in_quarantine() -> None:
    async def run() -> Bench:
        bench = Bench(FAST.model_copy(update={"give_up_after": 9, "quarantine_after": 2}), nodes="ab")
        await bench.supervisor.start()
        seen: list[str] = []
        for _ in range(3):
            handle = await bench.supervisor.ready()
            seen.append(handle.node)
            handle.kill()
            await bench.until(lambda handle=handle: bench.supervisor.handle not in (handle, None))
        assert seen == ["a", "a", "b"]
        await bench.supervisor.close()
        return bench

    bench = asyncio.run(run())
    assert bench.avoided == [frozenset(), frozenset(), frozenset("a"), frozenset("a")]


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_waits_double_with_failures_in_a_row_and_never_pass_their_bound(lives: list[float]) -> None:
    settings = ClusterConfig(backoff_s=0.5, most_backoff_s=8.0, healthy_s=10.0)
    failures = StartFailures(settings)
    before = 0.0
    for lived_s in lives:
        failures.record(lived_s)
        if lived_s >= settings.healthy_s or before == 0.0:
            assert failures.wait_s == 0.5
        else:
            assert failures.wait_s == min(2 * before, 8.0)
        before = failures.wait_s


def test_counts_of_earlier_sittings_go_on() -> None:
    counts = {"lost": 2, "restarted": 2}
    metrics = MemorySink()
    journal = FaultJournal(metrics, RecordingObserver(), counts)
    journal.record("trainer", "lost", "why")
    assert counts == {"lost": 3, "restarted": 2}
    assert metrics.rows == [{"kind": KIND, "step": 5, "name": "trainer", "mode": "lost"}]


def test_who_waits_for_any_of_several_parts_takes_one_that_is_added_meanwhile() -> None:
    async def run() -> None:
        away, other = Bench(), Bench()
        other.supervisor._supervision = away.health  # those of one run have it in common
        parts = SupervisedParts[Part](away.health)
        parts.add(away.supervisor)
        waiting = asyncio.ensure_future(parts.wait_any_ready())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        parts.add(other.supervisor)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await other.supervisor.start()
        await waiting
        await other.supervisor.close()
        with pytest.raises(PartLostError, match="no part of this kind is left"):
            await SupervisedParts[Part](away.health).wait_any_ready()

    asyncio.run(run())
