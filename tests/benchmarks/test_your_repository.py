"""The page on tasks has the table of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

from common import put_table
from your_repository_projects import table_of

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_committed_results(tmp_path: Path) -> None:
    result = json.loads((ROOT / "benchmarks/results/your_repository.json").read_text())
    page, copy = (ROOT / "docs/made-tasks.md").read_text(), tmp_path / "made-tasks.md"
    copy.write_text(page)
    put_table(copy, "your_repository.py", table_of(result))
    assert copy.read_text() == page, "benchmarks/your_repository.py --table docs/made-tasks.md"
    assert "| voluptuous 0.16.0 |" in page
