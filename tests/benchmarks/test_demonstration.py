"""How the demonstration decides and counts; its runs take hours."""

from __future__ import annotations

from demonstration import find_best, well_formed_share

from etude.evaluation.sessions import SessionRow


def row(task: str, passed: bool, malformed: int = 0) -> SessionRow:
    return SessionRow(task, task, 0, "ended", passed, float(passed), 1.0, 1.0, 1, 1, 0, malformed, 1.0)


def test_sft_ends_when_validation_has_not_risen_in_two_rounds() -> None:
    assert find_best([0.0]) == (0, False)
    assert find_best([0.1, 0.3, 0.3]) == (1, False)
    assert find_best([0.1, 0.3, 0.2, 0.3]) == (1, True)
    assert find_best([0.1, 0.3, 0.2, 0.4]) == (3, False)


def test_a_lead_is_split_by_whether_calls_were_well_formed_before() -> None:
    before = [row("a", False), row("b", False, malformed=2), row("c", True), row("d", False)]
    control = [row("a", False), row("b", False), row("c", True), row("d", False)]
    trained = [row("a", True), row("b", True), row("c", False), row("d", True)]
    assert well_formed_share(before, control, trained) == 0.5
    assert well_formed_share(before, trained, control) == 0.0
