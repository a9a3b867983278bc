"""The board of sessions: leases of clusters, and that each session counts once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from etude.controller.clusters.board import (
    Board,
    Lease,
    Member,
    PendingSession,
    ResultStanding,
    UnknownMemberError,
    check_name,
)
from etude.environment.runners import EpisodeRequest
from etude.errors import ConfigError
from etude.records import SamplingParams, TrajectoryId
from tests.environment.playing import TASK

LEASE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def episode(number: int = 0, min_step: int = 0) -> PendingSession:
    identity = TrajectoryId("run", TASK.id, 0, number, 0)
    return PendingSession(EpisodeRequest(TASK, identity, (1, number), SamplingParams(), True), min_step)


def new_board(max_gives: int = 3) -> tuple[Board, Clock]:
    clock = Clock()
    return Board(LEASE_S, max_gives, clock), clock


def joined(board: Board, name: str = "a", step: int = 0) -> Member:
    member = board.join(name)
    member.step = step
    return member


def numbers(leases: list[Lease]) -> list[int]:
    return [lease.session.request.identity.group for lease in leases]


def test_sessions_are_given_in_order_and_each_once() -> None:
    board, _ = new_board()
    for number in range(3):
        board.add(episode(number))
    member = joined(board)
    assert numbers(board.claim(member, 2)) == [0, 1]
    assert numbers(board.claim(member, 2)) == [2]
    assert board.claim(member, 2) == []


def test_clusters_share_what_waits() -> None:
    board, _ = new_board()
    for number in range(4):
        board.add(episode(number))
    first, second = joined(board, "a"), joined(board, "b")
    assert numbers(board.claim(first, 10)) == [0, 1]
    assert numbers(board.claim(second, 10)) == [2]


def test_a_cluster_that_may_play_nothing_has_no_share() -> None:
    board, _ = new_board()
    for number in range(4):
        board.add(episode(number, min_step=1))
    able, behind, new = joined(board, "able", step=1), joined(board, "behind"), joined(board, "new")
    new.step = None
    assert board.claim(behind, 10) == board.claim(new, 10) == []
    assert numbers(board.claim(able, 10)) == [0, 1, 2, 3]


def test_a_board_is_deserted_while_nobody_is_there_who_plays_or_will() -> None:
    board, clock = new_board()
    assert not board.is_deserted, "nothing waits"
    board.add(episode(0, min_step=1))
    assert board.is_deserted
    member = joined(board, step=0)
    assert not board.is_deserted, "new weights are on their way to it"
    member.trouble = "the relay does not answer"
    assert board.is_deserted
    member.step = 1
    assert not board.is_deserted, "what it has will do"
    board.claim(member, 1)
    board.add(episode(1, min_step=2))
    assert not board.is_deserted, "it plays"
    clock.now_s += LEASE_S + 1
    board.expire_leases()
    assert board.is_deserted


def test_weights_that_are_too_old_are_given_nothing_that_they_may_not_sample() -> None:
    board, _ = new_board()
    board.add(episode(0, min_step=3))
    board.add(episode(1, min_step=2))
    behind = joined(board, step=2)
    assert numbers(board.claim(behind, 10)) == [1]
    behind.step = None
    assert board.claim(behind, 10) == []
    behind.step = 3
    assert numbers(board.claim(behind, 10)) == [0]


def test_what_a_silent_cluster_has_is_given_to_another_and_its_result_dropped() -> None:
    board, clock = new_board()
    board.add(episode())
    silent = joined(board, "silent")
    (lease,) = board.claim(silent, 1)
    clock.now_s += LEASE_S + 1
    board.expire_leases()
    other = joined(board, "other")
    (second,) = board.claim(other, 1)
    assert board.judge_result(lease.id) == (ResultStanding.LATE, None)
    board.find(silent.id)
    assert board.record_heartbeat(silent, {lease.id: 5}) == [lease.id]
    assert board.judge_result(second.id) == (ResultStanding.CURRENT, second)
    board.complete(second)
    assert board.judge_result(second.id) == (ResultStanding.REPEATED, None)
    assert (board.counts.given, board.counts.kept, board.counts.lapsed) == (2, 1, 1)


def test_a_cluster_that_comes_back_goes_on_with_what_nobody_else_was_given() -> None:
    board, clock = new_board()
    board.add(episode())
    member = joined(board)
    (lease,) = board.claim(member, 1)
    clock.now_s += LEASE_S + 1
    board.expire_leases()
    assert len(board.waiting) == 1
    board.find(member.id)
    assert board.record_heartbeat(member, {lease.id: 5}) == []
    assert not board.waiting
    assert board.judge_result(lease.id) == (ResultStanding.CURRENT, lease)


def test_a_cluster_that_stays_away_is_forgotten_and_joins_again() -> None:
    board, clock = new_board()
    board.add(episode())
    gone, there = joined(board, "gone"), joined(board, "there")
    (lease,) = board.claim(gone, 1)
    for _ in range(25):
        clock.now_s += 3600.0
        board.find(there.id)
        board.expire_leases()
    assert list(board.members.values()) == [there]
    with pytest.raises(UnknownMemberError):
        board.find(gone.id)
    assert board.judge_result(lease.id) == (ResultStanding.CURRENT, lease), (
        "what it had done is good all the same"
    )
    again = joined(board, "gone")
    assert board.record_heartbeat(again, {lease.id: 5}) == [lease.id]
    assert numbers(board.claim(again, 1)) == [0]


def test_a_result_of_a_lapsed_lease_counts_while_the_session_waits() -> None:
    board, clock = new_board()
    board.add(episode())
    (lease,) = board.claim(joined(board), 1)
    clock.now_s += LEASE_S + 1
    board.expire_leases()
    board.complete(lease)
    assert not board.waiting


def test_leases_that_got_lost_on_their_way_are_taken_back() -> None:
    board, clock = new_board()
    board.add(episode())
    member = joined(board)
    (lease,) = board.claim(member, 1)
    clock.now_s += LEASE_S - 1
    board.find(member.id)
    board.record_heartbeat(member, {})
    assert not board.waiting, "its answer may still be under way"
    clock.now_s += 2
    board.find(member.id)
    board.record_heartbeat(member, {})
    assert len(board.waiting) == 1
    (again,) = board.claim(member, 1)
    assert again.id != lease.id


def test_another_cluster_of_the_same_name_replaces_the_first() -> None:
    board, _ = new_board()
    board.add(episode())
    first = joined(board, "a")
    (lease,) = board.claim(first, 1)
    second = joined(board, "a")
    with pytest.raises(UnknownMemberError):
        board.find(first.id)
    assert len(board.claim(second, 1)) == 1
    assert board.judge_result(lease.id)[0] is ResultStanding.LATE


def test_a_session_that_fails_goes_to_another_cluster_if_one_wants_it() -> None:
    board, clock = new_board()
    board.add(episode())
    first, second = joined(board, "a"), joined(board, "b")
    (lease,) = board.claim(first, 1)
    board.fail(lease, "the sandbox died")
    assert board.waiting
    assert board.claim(first, 1) == []
    (again,) = board.claim(second, 1)
    board.fail(again, "there, too")
    assert board.claim(second, 1) == []
    clock.now_s += LEASE_S
    for member in (first, second):
        board.find(member.id)
    assert len(board.claim(second, 1)) == 1, "nobody else took it in time"


def test_a_session_that_is_given_away_too_often_is_exhausted_with_its_cause() -> None:
    board, _ = new_board(max_gives=2)
    one, told = episode(), list[object]()
    one.on_ended = told.append
    board.add(one)
    member = joined(board)
    board.fail(board.claim(member, 1)[0], "first")
    assert not told
    board.fail(board.claim(member, 1)[0], "second")
    assert one.ended
    assert told == ["given to clusters 2 times: second"]
    assert not board.waiting


def test_what_is_withdrawn_is_neither_given_nor_kept() -> None:
    board, _ = new_board()
    waiting, running = episode(0), episode(1)
    board.add(running)
    member = joined(board)
    (lease,) = board.claim(member, 1)
    board.add(waiting)
    for one in (waiting, running, running):
        board.withdraw(one)
    assert not board.waiting
    assert board.record_heartbeat(member, {lease.id: 3}) == [lease.id]
    assert board.judge_result(lease.id)[0] is ResultStanding.LATE
    assert board.counts.withdrawn == 2


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a/b", "ä"])
def test_names_that_records_could_not_carry_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name)


class Clusters(RuleBasedStateMachine):
    """Whatever happens in whatever order: every session ends once, and is in one place until then."""

    members = Bundle("members")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.board, self.clock = new_board(max_gives=4)
        self.episodes: list[PendingSession] = []
        self.ends: Counter[int] = Counter()

    @rule(count=st.integers(1, 4))
    def ordered(self, count: int) -> None:
        for _ in range(count):
            one = episode(number := len(self.episodes))
            one.on_ended = lambda _, ended=number: self.ends.update([ended])
            self.episodes.append(one)
            self.board.add(one)

    @rule(target=members, name=st.sampled_from("abc"))
    def joins(self, name: str) -> Member:
        member = self.board.join(name)
        member.step = 0
        return member

    @rule(target=leases, member=members, most=st.integers(1, 3))
    def claims(self, member: Member, most: int) -> object:
        if member.id not in self.board.members:
            return multiple()
        return multiple(*self.board.claim(self.board.find(member.id), most))

    @rule(seconds=st.one_of(st.floats(0, 2 * LEASE_S), st.just(2 * 24 * 3600.0)))
    def waits(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.board.expire_leases()

    @rule(member=members, named=st.lists(leases, max_size=4))
    def beats(self, member: Member, named: list[Lease]) -> None:
        if member.id in self.board.members:
            running = {lease.id: 1 for lease in named if lease.member is member}
            self.board.record_heartbeat(self.board.find(member.id), running)

    @rule(lease=leases)
    def delivers(self, lease: Lease) -> None:
        standing, current = self.board.judge_result(lease.id)
        if standing is ResultStanding.CURRENT:
            assert current is lease
            self.board.complete(lease)
            lease.session.on_ended("")

    @rule(lease=consumes(leases))
    def fails(self, lease: Lease) -> None:
        if self.board.judge_result(lease.id)[0] is ResultStanding.CURRENT:
            self.board.fail(lease, "it failed")

    @rule(member=consumes(members))
    def leaves(self, member: Member) -> None:
        if member.id in self.board.members:
            self.board.leave(member)

    @rule(data=st.data())
    def withdrawn(self, data: st.DataObject) -> None:
        left = [one for one in self.episodes if not one.ended]
        if left:
            one = data.draw(st.sampled_from(left))
            self.board.withdraw(one)
            one.on_ended("")

    @invariant()
    def every_session_is_in_one_place_until_its_one_end(self) -> None:
        held = Counter(id(one) for one in self.board.waiting)
        held.update(id(x.session) for m in self.board.members.values() for x in m.leases.values())
        for one in self.episodes:
            number = one.request.identity.group
            assert self.ends[number] == one.ended
            assert held[id(one)] == (not one.ended), number


TestClusters = Clusters.TestCase
TestClusters.settings = settings(stateful_step_count=40)
