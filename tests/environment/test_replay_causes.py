import time

import pytest

from etude.environment.history import Difference, causes_of
from etude.records import ToolCall, ToolErrorClass, ToolResult


def difference(before: str, now: str, error: ToolErrorClass | None = None) -> Difference:
    return Difference(0, 0, ToolCall("run_command"), ToolResult(before), ToolResult(now, error))


@pytest.mark.parametrize(
    ("before", "now", "causes"),
    [
        ("1 failed in 0.43s", "1 failed in 0.44s", ("durations",)),
        ("took 12 ms", "took 9.5 ms", ("durations",)),
        ("<object at 0x7fe1ed1a46d0>", "<object at 0x7f17a42c46d0>", ("addresses",)),
        ("2026-11-21 13:13:13.08 +0000 a.py", "2026-11-21 13:13:15.37 +0000 a.py", ("dates and times",)),
        (" 13:13:13 up", " 13:13:16 up", ("dates and times",)),
        ("/tmp/tmp.0T6NGK8aRB", "/tmp/tmp.pYcrh5iVRy", ("temporary names",)),
        ("0xabcdef12 in 1s", "0xabcdef13 in 2s", ("addresses", "durations")),
        ("1 failed in 0.43s", "2 failed in 0.43s", ()),
        ("1 failed in 0.43s", "2 failed in 0.44s", ()),
        ("0.6551", "0.8141", ()),
        ("v1.2s", "v1.2", ()),
    ],
)
def test_what_alone_differs_is_named(before: str, now: str, causes: tuple[str, ...]) -> None:
    assert causes_of(difference(before, now)) == causes


def test_an_error_is_never_explained_away() -> None:
    assert causes_of(difference("in 1s", "in 2s", ToolErrorClass.TIMEOUT)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["0x", "1", "12:", "2026-11-21 ", "/tmp/", "1.1 "])
def test_long_answers_take_linear_time(piece: str) -> None:
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        began = time.process_time()
        causes_of(difference(text, text + "x"))
        return time.process_time() - began

    seconds(1000)
    assert seconds(400_000) < 100 * max(seconds(50_000), 1e-3)
