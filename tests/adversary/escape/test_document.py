"""`docs/escape.md` says what the table of attempts and the list of holes say."""

from __future__ import annotations

from tests.adversary.escape.attempts import ATTEMPTS
from tests.adversary.escape.document import PATH, page, results_in
from tests.adversary.escape.holes import HOLES
from tests.adversary.escape.model import USERS

TEXT = PATH.read_text(encoding="utf-8")
FIX = "run benchmarks/adversary.py, then `python -m tests.adversary.escape.document`"


def test_the_page_is_what_the_table_makes_of_its_results() -> None:
    when = TEXT.partition("Last run: ")[2].partition("\n")[0]
    assert page(results_in(TEXT), when) == TEXT, FIX


def test_every_attempt_was_tried_on_the_local_backend() -> None:
    results = results_in(TEXT)
    for name, attempt in ATTEMPTS.items():
        for user in attempt.users:
            assert f"local, {user}" in results[name], f"{name}: {FIX}"


def test_the_holes_of_the_page_are_those_of_the_list() -> None:
    for name, row in results_in(TEXT).items():
        for backend, holes in HOLES.items():
            for user in USERS:
                if row.get(f"{backend}, {user}") == "HOLE":
                    assert name in holes, f"{backend}, {user}, {name}: {FIX}"
