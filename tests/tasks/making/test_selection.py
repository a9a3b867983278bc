"""The set of tasks keeps every quota, and each reject says why."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.tasks.making.changes import Change, Place, Quotas, TestFailure, Verified
from etude.tasks.making.selection import grade_tasks, select

QUOTAS = Quotas()


def verified(at: int, operator: str, function: str, named: bool = False, files: int = 1) -> Verified:
    paths = ["lib/m0.py", "lib/m4.py"][:files]
    own = dict.fromkeys(paths, f"x = 1\ny = 'own{at}'\n")
    broken = dict.fromkeys(paths, f"x = 1\ny = 'broken{at}' + 'more{at}'\n")
    places = tuple(Place(path, function, 2, 2) for path in paths)
    frame = Place(paths[0], function, 2 if named else 1, 2 if named else 1)
    failure = TestFailure(f"tests/test_a.py::test_{at}", "assert 1 == 2", 1, frame)
    return Verified(Change("planted_bug", operator, broken, places), own, (failure,), "Fix it.", at + 1)


CANDIDATES = st.lists(
    st.tuples(st.sampled_from("abcdefghijkl"), st.integers(0, 30), st.booleans(), st.integers(1, 2)),
    max_size=60,
).map(lambda rows: [verified(at, o, f"f{f}", n, k) for at, (o, f, n, k) in enumerate(rows)])


@settings(max_examples=30, deadline=None)
@given(CANDIDATES)
def test_every_quota_holds_of_what_is_kept(candidates: list[Verified]) -> None:
    selection = select(candidates, QUOTAS)
    kept = selection.kept
    rejected = [one for one, _ in selection.rejected]
    assert Counter(map(id, [*kept, *rejected])) == Counter(map(id, candidates))
    functions = Counter((place.path, place.name) for one in kept for place in one.change.places)
    assert all(count <= QUOTAS.most_per_function for count in functions.values())
    operators = Counter(one.change.operator for one in kept)
    assert all(count <= max(1, QUOTAS.most_per_operator * len(kept)) for count in operators.values())
    is_short = sum(one.is_compound for one in kept) < QUOTAS.least_compound * len(kept)
    assert bool(selection.missed) == is_short
    assert sum(one.names_edited_line for one in kept) <= QUOTAS.most_named_lines * len(kept)
    assert all(reason for _, reason in selection.rejected)


def test_a_varied_set_is_kept_whole() -> None:
    candidates = [verified(at, "abcdefgh"[at % 8], f"f{at}", at % 5 == 0, 1 + at % 2) for at in range(40)]
    assert len(select(candidates, QUOTAS).kept) == 40
    assert len(select(candidates, Quotas(most_tasks=10)).kept) <= 10


def test_without_tasks_of_two_files_or_bugs_the_others_are_kept_and_the_share_is_said_to_be_missed() -> None:
    singles = [verified(at, "abcdefgh"[at % 8], f"f{at}") for at in range(40)]
    selection = select(singles, QUOTAS)
    assert len(selection.kept) == 40
    assert selection.missed.startswith("0 of 40 tasks have two files or bugs; 25% were wanted")


def test_of_too_many_tasks_those_of_two_files_or_bugs_stay_until_their_share_holds() -> None:
    candidates = [verified(at, "abcdefgh"[at % 8], f"f{at}", files=1 + (at >= 32)) for at in range(40)]
    selection = select(candidates, Quotas(most_tasks=16))
    kept = selection.kept
    assert (len(kept), selection.missed) == (16, "")
    assert sum(one.is_compound for one in kept) == 4


def test_near_duplicates_are_dropped() -> None:
    first, second = (verified(at, "ab"[at], "f", files=2) for at in range(2))
    again = Verified(first.change, first.reference, first.failures)
    selection = select([first, second, again], QUOTAS)
    assert [reason for one, reason in selection.rejected if one is again] == [
        "near-duplicate: the same tests fail for nearly the same difference"
    ]


def test_a_task_is_harder_the_more_lines_there_are_to_search() -> None:
    tasks = [verified(at, "abc"[at], f"f{at}", files=2) for at in (2, 0, 1)]
    assert grade_tasks(tasks) == ["hard", "easy", "medium"]
