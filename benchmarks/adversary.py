"""Claim: no attack of tests/adversary succeeds, on grading, on sandboxes from inside, or on the servers.

    python benchmarks/adversary.py [--only GROUP]... [--match WORDS] [--json FILE]

Runs the tests of each group, slow ones included, and prints one line per kind of attack and a table of
figures; with `--json` the groups that were run replace those in the file, so groups can be run one at a time.
A failed test counts as a successful attack whatever the reason, and its message is printed. If none of n
attempts succeeds, `..._below` is the upper bound of the rate with 95 % confidence: 3/n (Hanley and
Lippman-Hand 1983). Exit code 1 if any attack succeeded.

Sandboxes are attacked as root and as a plain user, on every available backend: `tried_BACKEND_USER`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Figures, merge_result, print_table
from tests.adversary.escape.causes import CAUSES, FOUND_BEFORE

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "adversary.json"
_WITH_SLOW = ("-m", "slow or not slow")
_CAUSE_OF = {name: cause for cause, names in CAUSES.items() for name in names}
_HACKS_OF_PLAIN = "test_a_hack_is_paid_nowhere_by_a_plain_users_sandboxes"
_SCRIPT_CHEATS = "test_a_cheat_on_a_script_is_paid_nowhere"
_FAULTS = {
    "stalls_over_1s": re.compile(r"no answer for|longest_s"),
    "server_errors_5xx": re.compile(r": 5\d\d "),
    "cross_tenant": re.compile(r"SECRETOFTWO|second-tenant"),
}
"""Phrases in the message of a failed request test, by what they show."""


@dataclass(frozen=True)
class Case:
    """One test of one kind of attack, and its outcome."""

    function: str
    kind: str
    outcome: str
    """held, got through, or skipped."""
    words: str = ""
    backend: str = ""
    user: str = ""


def read_cases(report: Path, functions: Sequence[str]) -> list[Case]:
    """The cases of a JUnit report whose test is one of `functions`.

    Errors count as successful attacks, and so do known holes, although their tests expect them.
    """
    cases: list[Case] = []
    for row in ET.parse(report).iter("testcase"):
        function, _, kind = row.attrib["name"].removesuffix("]").partition("[")
        if function not in functions:
            continue
        ends = {tag: found for tag in ("failure", "error", "skipped") if (found := row.find(tag)) is not None}
        is_hole = "skipped" in ends and ends["skipped"].get("type") == "pytest.xfail"
        got_through = is_hole or {"failure", "error"} & ends.keys()
        word = "got through" if got_through else "skipped" if ends else "held"
        words = " ".join(f"{end.get('message', '')} {end.text or ''}" for end in ends.values())
        cases.append(_placed(Case(function, kind, word, words)))
    return cases


def _placed(case: Case) -> Case:
    """Splits off backend and user, which a sandbox attack has in front of its kind."""
    match = re.fullmatch(r"(?:(gvisor|vm)-)?(root|plain)-(.*)", case.kind)
    if match is None:
        return case
    return Case(case.function, match[3], case.outcome, case.words, match[1] or "local", match[2])


def _kinds(cases: Iterable[Case]) -> set[str]:
    return {case.kind for case in cases if case.outcome != "skipped"}


def _through(cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if case.outcome == "got through"]


def _with_bound(figures: Figures, name: str, num_tries: int) -> Figures:
    """`figures` with the bound of figure `name` added, if that is 0."""
    return figures | ({f"{name}_below": min(1.0, 3 / num_tries)} if not figures[name] and num_tries else {})


def count_hacks(cases: list[Case]) -> Figures:
    """Reward hacks: each is tried on at least three tasks, as root and as a plain user."""
    tries = [case for case in cases if case.outcome != "skipped"]
    figures: Figures = {
        "reward_hack_kinds": len(_kinds(tries)),
        "reward_hacks_paid": len(_kinds(_through(tries))),
    }
    plain = _kinds(case for case in tries if case.function == _HACKS_OF_PLAIN)
    if plain:
        figures["reward_hack_kinds_plain"] = len(plain)
    return _with_bound(figures, "reward_hacks_paid", len(tries))


def count_script_cheats(cases: list[Case]) -> Figures:
    """Reward hacks of `tests/test.sh`, and the controls that show that they work on a weak grader."""
    tries = [case for case in cases if case.outcome != "skipped"]
    cheats = [case for case in tries if case.function == _SCRIPT_CHEATS]
    others = [case for case in tries if case.function != _SCRIPT_CHEATS]
    figures: Figures = {
        "script_cheat_kinds": len(_kinds(cheats)),
        "script_cheats_paid": len(_kinds(_through(cheats))),
        "script_controls": len(others),
        "script_controls_failed": len(_through(others)),
    }
    return _with_bound(figures, "script_cheats_paid", len(cheats))


def count_dodges(cases: list[Case]) -> Figures:
    """Failures that an agent tries to pass off as the infrastructure's, and rewards lost on solved tasks."""
    tries = [case for case in cases if case.outcome != "skipped"]
    with_control = [case for case in tries if case.function.endswith("costs_a_success")]
    # Of the failed cases only messages about the solved session concern the control.
    paid = [case for case in with_control if case.outcome == "held" or "solved." not in case.words]
    voided = [case for case in _through(tries) if "solved.passed" not in case.words]
    figures: Figures = {"dodge_kinds": len(_kinds(tries)), "voided_by_agent": len(_kinds(voided))}
    if with_control:
        figures["dodge_controls_paid"] = len(paid) / len(with_control)
    return _with_bound(figures, "voided_by_agent", len(tries))


def count_requests(cases: list[Case]) -> Figures:
    """Effects of hostile requests on servers and other tenants. `request_failures`: for any reason."""
    tries = [case for case in cases if case.outcome != "skipped"]
    figures: Figures = {"server_request_kinds": len(_kinds(tries)), "request_failures": len(_through(tries))}
    for name, words in _FAULTS.items():
        figures[name] = sum(bool(words.search(case.words)) for case in _through(tries))
        figures = _with_bound(figures, name, len(tries))
    return figures


def count_attacks(cases: list[Case]) -> Figures:
    """Attacks from inside a sandbox, counted by cause; one escape on any backend counts."""
    tries = [case for case in cases if case.outcome != "skipped"]
    causes = {_CAUSE_OF[case.kind] for case in tries}
    figures: Figures = {
        "sandbox_attack_kinds": len(causes),
        "sandbox_attack_kinds_new": len(causes - FOUND_BEFORE),
        "escapes": len({_CAUSE_OF[case.kind] for case in _through(tries)}),
    }
    for place in sorted({(case.backend, case.user) for case in tries}):
        here = [case for case in tries if (case.backend, case.user) == place]
        name = "_".join(place)
        figures |= {f"tried_{name}": len(here), f"escapes_{name}": len(_through(here))}
    return _with_bound(figures, "escapes", len(tries))


def count_controls(cases: list[Case]) -> Figures:
    """Controls: attacks that must succeed without the protection, or where the act is allowed."""
    tries = [case for case in cases if case.outcome != "skipped"]
    return {"attack_controls": len(tries), "attack_controls_failed": len(_through(tries))}


@dataclass(frozen=True)
class Group:
    """A group of attack tests: its files, the functions that try one kind each, and its figures."""

    files: tuple[str, ...]
    functions: tuple[str, ...]
    count: Callable[[list[Case]], Figures]
    bad: tuple[str, ...]
    """Figures that must be 0."""


_ESCAPE = "escape/test_local.py"
GROUPS: dict[str, Group] = {
    "hacks": Group(
        ("test_hacks.py",),
        ("test_a_hack_is_paid_nowhere", _HACKS_OF_PLAIN),
        count_hacks,
        ("reward_hacks_paid",),
    ),
    "scripts": Group(
        ("test_script_hacks.py",),
        (
            _SCRIPT_CHEATS,
            "test_the_same_acts_beside_a_solution_are_paid",
            "test_a_cheat_fools_a_grader_that_runs_the_script_in_place",
            "test_a_solution_is_paid_by_the_script_and_nothing_is_not",
        ),
        count_script_cheats,
        ("script_cheats_paid", "script_controls_failed"),
    ),
    "dodges": Group(
        ("test_dodges.py",),
        (
            "test_an_act_neither_voids_a_failure_nor_costs_a_success",
            "test_an_act_before_a_sleep_neither_voids_a_failure_nor_costs_a_success",
            "test_what_goes_beyond_a_limit_is_a_failure_of_the_agent",
            "test_what_waits_for_the_grading_is_a_verdict",
            "test_an_act_by_tools_neither_voids_a_failure_nor_costs_a_success",
        ),
        count_dodges,
        ("voided_by_agent",),
    ),
    "requests": Group(
        ("test_requests.py", "test_sockets.py"),
        (
            "test_a_hostile_request_neither_breaks_nor_holds_up_nor_shows_anything",
            "test_a_hostile_message_is_an_error_and_the_episode_goes_on",
        ),
        count_requests,
        ("request_failures",),
    ),
    "sandboxes": Group((_ESCAPE,), ("test_the_attempt_fails",), count_attacks, ("escapes",)),
    "guests": Group(
        ("escape/test_other_backends.py",),
        ("test_the_attempt_fails_in_a_guest",),
        lambda cases: {f"guest_{key}": value for key, value in count_attacks(cases).items()},
        ("guest_escapes",),
    ),
    "controls": Group(
        (_ESCAPE,),
        ("test_the_attempt_succeeds_without_its_protection",),
        count_controls,
        ("attack_controls_failed",),
    ),
}


def run_group(group: Group, match: str = "") -> list[Case]:
    """Runs a group's tests in a subprocess. `match`: expression for pytest's -k."""
    places = [_ROOT / "tests" / "adversary" / name for name in group.files]
    files = [str(place) for place in places if place.exists()]
    chosen = " or ".join(group.functions)
    with tempfile.TemporaryDirectory(prefix="etude-adversary-") as directory:
        report = Path(directory) / "report.xml"
        chosen = f"({chosen}) and ({match})" if match else chosen
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--tb=short", *_WITH_SLOW, "-k", chosen]
        ended = subprocess.run(
            [*command, f"--junitxml={report}", *files], cwd=_ROOT, capture_output=True, text=True, check=False
        )
        if not report.exists():
            sys.exit(f"pytest made no report: {(ended.stdout + ended.stderr)[-2000:]}")
        return read_cases(report, group.functions)


def rows_of(cases: Iterable[Case]) -> dict[str, Any]:
    """Kind -> outcome, for the JSON file; sandbox attacks by cause, backend and user."""
    rows: dict[str, Any] = {}
    for case in cases:
        if case.backend:
            place = f"{case.backend}, {case.user}"
            rows.setdefault(_CAUSE_OF[case.kind], {}).setdefault(case.kind, {})[place] = case.outcome
        elif rows.get(case.kind) != "got through":
            rows[case.kind] = case.outcome
    return rows


def print_cases(name: str, cases: Iterable[Case]) -> None:
    """Prints one line per kind, and the messages of successful attacks."""
    print(f"\n{name}")
    for kind, found in rows_of(cases).items():
        shown = found if isinstance(found, str) else "; ".join(_short(k, v) for k, v in found.items())
        print(f"  {kind:72.72s} {shown}")
    for case in _through(cases):
        print(
            f"\n  GOT THROUGH: {case.function} {case.backend} {case.user} {case.kind}\n{case.words[-1500:]}"
        )


def _short(kind: str, places: dict[str, str]) -> str:
    ends = sorted(set(places.values()))
    return f"{kind}: {', '.join(ends)} ({len(places)})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(GROUPS)
    parser.add_argument("--only", action="append", choices=list(GROUPS), metavar="GROUP", help=names)
    parser.add_argument(
        "--match", default="", metavar="WORDS", help="kinds that pytest's -k selects by these"
    )
    parser.add_argument("--json", type=Path, nargs="?", const=_RESULTS, help="file of the results")
    arguments = parser.parse_args()
    if arguments.match and arguments.json:
        parser.error("--match tries some kinds only: figures of those are not for a file")
    failed: list[str] = []
    measured: Figures = {}
    rows: dict[str, dict[str, str]] = {}
    for name in arguments.only or GROUPS:
        cases = run_group(GROUPS[name], arguments.match)
        figures = GROUPS[name].count(cases)
        print_cases(name, cases)
        print_table(name, figures)
        failed += [key for key in GROUPS[name].bad if figures.get(key)]
        measured |= figures
        rows[name] = rows_of(cases)
    if arguments.json is not None:  # in the end only: a changed file makes the commit of later results dirty
        merge_result(arguments.json, list(rows), measured, rows)
    if failed:
        sys.exit(f"got through: {', '.join(failed)}")


if __name__ == "__main__":
    main()
