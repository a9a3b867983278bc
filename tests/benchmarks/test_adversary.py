"""The adversary benchmark's figures: a failed test counts as a successful attack, whatever the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.adversary import (
    GROUPS,
    Case,
    count_attacks,
    count_dodges,
    count_hacks,
    count_requests,
    read_cases,
    rows_of,
)

from tests.adversary.escape.causes import CAUSES

HOST, RIGHTS = "signal a host process", "become another user"
REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="c" name="test_the_attempt_fails[root-signal a host process]" />
<testcase classname="c" name="test_the_attempt_fails[plain-signal a host process]"><failure message="out">x</failure></testcase>
<testcase classname="c" name="test_the_attempt_fails_in_a_guest[vm-root-become another user]"><skipped type="pytest.skip" message="no"/></testcase>
<testcase classname="c" name="test_the_attempt_fails[root-become another user]"><skipped type="pytest.xfail" message="a hole"/></testcase>
<testcase classname="c" name="test_something_else[root-x]"><failure message="no">x</failure></testcase>
</testsuite></testsuites>"""  # noqa: E501 -- as pytest writes it
ACT, GRADED = GROUPS["dodges"].functions[0], GROUPS["dodges"].functions[3]


def test_a_report_says_what_held_what_got_through_and_what_was_not_tried(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    functions = (*GROUPS["sandboxes"].functions, *GROUPS["guests"].functions)
    cases = read_cases(path, functions)
    ends = {(case.backend, case.user, case.kind): case.outcome for case in cases}
    assert ends == {
        ("local", "root", HOST): "held",
        ("local", "plain", HOST): "got through",
        ("vm", "root", RIGHTS): "skipped",
        ("local", "root", RIGHTS): "got through",
    }
    assert "out" in cases[1].words


def test_attacks_are_counted_by_cause_and_place_and_zeros_have_their_bound() -> None:
    variants = [Case("f", name, "held", "", "local", "root") for name in CAUSES[_cause_of(HOST)]]
    figures = count_attacks([*variants, Case("f", RIGHTS, "held", "", "gvisor", "plain")])
    assert len(variants) > 1
    assert figures["sandbox_attack_kinds"] == 2
    assert (figures["escapes"], figures["escapes_below"]) == (0, 3 / (len(variants) + 1))
    assert (figures["tried_local_root"], figures["tried_gvisor_plain"]) == (len(variants), 1)
    escaped = count_attacks([*variants, Case("f", RIGHTS, "got through", "", "local", "plain")])
    assert (escaped["escapes"], escaped["escapes_local_plain"], escaped["escapes_local_root"]) == (1, 1, 0)
    assert "escapes_below" not in escaped


def _cause_of(name: str) -> str:
    return next(cause for cause, names in CAUSES.items() if name in names)


def test_what_was_not_tried_is_no_kind() -> None:
    assert count_hacks([Case("f", "a", "skipped"), Case("f", "b", "held")]) == {
        "reward_hack_kinds": 1,
        "reward_hacks_paid": 0,
        "reward_hacks_paid_below": 1.0,
    }
    assert count_hacks([Case("f", "a", "got through"), Case("f", "b", "held")])["reward_hacks_paid"] == 1


def test_a_dodge_that_fails_voids_unless_its_words_are_of_the_solved_task() -> None:
    held = [Case(ACT, "a", "held"), Case(GRADED, "b", "held")]
    assert count_dodges(held)["dodge_controls_paid"] == 1.0
    unpaid = Case(ACT, "c", "got through", "assert solved.passed, solved.cause")
    voided = Case(ACT, "d", "got through", "assert failed.voided is None")
    figures = count_dodges([*held, unpaid, voided])
    assert (figures["dodge_kinds"], figures["voided_by_agent"]) == (4, 1)
    assert figures["dodge_controls_paid"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("sandbox: no answer for 1.2 s", "stalls_over_1s"),
        ("AssertionError: router: 500 {'content-type'", "server_errors_5xx"),
        ("assert 'SECRETOFTWO' not in text", "cross_tenant"),
    ],
)
def test_a_failed_request_is_counted_by_what_its_test_says(words: str, name: str) -> None:
    figures = count_requests([Case("f", "a", "got through", words), Case("f", "b", "held")])
    assert (figures["server_request_kinds"], figures["request_failures"], figures[name]) == (2, 1, 1)
    others = {"stalls_over_1s", "server_errors_5xx", "cross_tenant"} - {name}
    assert [figures[other] for other in others] == [0, 0]


def test_a_kind_that_got_through_once_is_not_hidden_by_a_second_test() -> None:
    cases = [Case("f", "a", "got through"), Case("g", "a", "held")]
    assert rows_of(cases) == rows_of(cases[::-1]) == {"a": "got through"}


def test_every_group_runs_tests_that_there_are() -> None:
    there = "".join(path.read_text() for path in (Path(__file__).parents[1] / "adversary").rglob("test_*.py"))
    functions = {name for group in GROUPS.values() for name in group.functions}
    assert {name for name in functions if f"def {name}(" not in there} == set()
