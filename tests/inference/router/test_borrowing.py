from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etude.inference.router.borrowing import Borrower, LoanBook
from etude.inference.router.types import Replica, ReplicaState
from tests.inference.router.test_members import BY_LOAD, POOLS, lender_of

WINDOW = {**POOLS, "count": 1, "start": "00:00", "end": "01:00"}


def replicas(*pools: str) -> dict[str, Replica]:
    return {f"r{n}": Replica(f"r{n}", "serve", pool, "v@0") for n, pool in enumerate(pools)}


def borrower(wanted: int = 9, **options: object) -> Borrower:
    return Borrower(pool="rollout", wanted=wanted, lease_s=10.0, **options)  # type: ignore[arg-type]


def lend_all(books: LoanBook, table: dict[str, Replica], now_s: float = 0.0) -> list[str]:
    found = books.begin_due(table, now_s)
    for one in found:
        one.id, one.token = f"loan-{one.replica}", "token"
    return [one.replica for one in found]


def test_a_run_gets_ready_replicas_of_its_pool_up_to_what_it_wants() -> None:
    books, table = LoanBook(), replicas("serve", "rollout", "rollout", "rollout")
    table["r1"].state = ReplicaState.EJECTED
    assert lend_all(books, table) == []
    books.check_in("run", borrower(1), 0.0)
    assert lend_all(books, table) == ["r2"]
    assert lend_all(books, table) == []
    books.check_in("run", borrower(5), 0.0)
    assert lend_all(books, table) == ["r3"]
    assert [one.replica for one in books.granted_to("run")] == ["r2", "r3"]
    assert books.granted_to("other") == []


def test_a_replica_is_recalled_when_its_pool_wants_it_or_the_run_does_not() -> None:
    books, table = LoanBook(), replicas("rollout", "rollout", "rollout")
    books.check_in("run", borrower(), 0.0)
    lend_all(books, table)
    assert books.end_due(table) == []
    table["r0"].pool = "serve"
    (ended,) = books.end_due(table)
    assert ended.replica == "r0" and not ended.is_granted
    assert books.end_due(table) == [], "once"
    assert lend_all(books, table) == []
    books.remove(ended)
    books.check_in("run", borrower(1), 0.0)
    assert [one.replica for one in books.end_due(table)] == ["r2"]
    books.check_in("run", borrower(9, refused=["r1"]), 0.0)
    assert [one.replica for one in books.end_due(table)] == ["r1"]


def test_a_run_that_falls_silent_loses_all() -> None:
    books, table = LoanBook(), replicas("rollout")
    books.check_in("run", borrower(), 5.0)
    lend_all(books, table)
    assert books.expire(14.0) == []
    assert books.expire(15.1) == ["run"]
    assert len(books.end_due(table)) == 1
    assert not books.check_out("run")


def test_a_replica_that_does_not_take_a_loan_is_left_alone_for_a_while() -> None:
    books, table = LoanBook(), replicas("rollout")
    books.check_in("run", borrower(), 0.0)
    (asked,) = books.begin_due(table, 0.0)
    books.record_refusal(asked, 0.0)
    assert books.begin_due(table, 1.0) == []
    assert len(books.begin_due(table, 6.0)) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=25))
def test_a_replica_has_one_borrower_and_no_run_more_than_it_wants(moves: list[tuple[int, int, bool]]) -> None:
    books, table = LoanBook(), replicas(*["rollout"] * 4)
    for step, (what, number, flag) in enumerate(moves):
        name = f"run{number % 2}"
        if what < 2:
            books.check_in(name, borrower(number), float(step))
        elif what == 2:
            table[f"r{number}"].pool = "rollout" if flag else "serve"
        elif what == 3:
            books.check_out(name)
        for one in books.end_due(table):
            if flag:
                books.remove(one)
        lend_all(books, table, float(step))
        for name, run in books.borrowers.items():
            active = [one for one in books.loans.values() if one.borrower == name]
            assert sum(one.is_granted for one in active) <= run.wanted
        for one in books.loans.values():
            if one.is_granted:
                assert table[one.replica].pool == "rollout"
                assert one.borrower in books.borrowers


def test_who_is_loaded_gets_its_replica_back_at_once_and_lends_again_later() -> None:
    lender = lender_of(by_load=[BY_LOAD], hold_s=60.0)
    every = list(replicas("serve", "serve").values())
    (move,) = lender.moves(every, 0.0, 0.0, {"rollout": 5000.0})
    assert move.pool == "rollout"
    lent = next(r for r in every if r.name == move.replica)
    lent.pool = "rollout"
    lent.state = ReplicaState.EJECTED
    other = next(r for r in every if r is not lent)
    other.work = 5000
    (back,) = lender.moves(every, 0.1, 0.0, {"rollout": 5000.0})
    assert (back.replica, back.pool) == (lent.name, "serve")
    lent.pool, other.work = "serve", 0
    assert lender.moves(every, 30.0, 0.0, {"rollout": 5000.0}) == []
    assert len(lender.moves(every, 61.0, 0.0, {"rollout": 5000.0})) == 1


def test_a_window_closes_while_its_lender_is_loaded() -> None:
    lender = lender_of(windows=[{**WINDOW, "busy_tokens": 1000.0}], hold_s=60.0)
    every = list(replicas("serve", "serve").values())
    (move,) = lender.moves(every, 0.0, 10.0)
    lent = next(r for r in every if r.name == move.replica)
    other = next(r for r in every if r is not lent)
    lent.pool, other.work = "rollout", 5000
    (back,) = lender.moves(every, 5.0, 10.0)
    assert (back.replica, back.pool) == (lent.name, "serve")
    lent.pool, other.work = "serve", 0
    assert lender.moves(every, 64.0, 10.0) == [], "not before it was quiet for hold_s"
    assert len(lender.moves(every, 66.0, 10.0)) == 1


def test_what_was_moved_by_hand_no_rule_moves() -> None:
    lender = lender_of(windows=[WINDOW])
    every = replicas("serve", "serve", "serve")
    every["r0"].pool, every["r0"].by_hand = "rollout", True
    assert lender.moves(every.values(), 0.0, 7200.0) == []
    every["r0"].pool = "serve"
    (move,) = lender.moves(every.values(), 0.0, 10.0)
    assert move.replica != "r0"
