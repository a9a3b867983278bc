"""A look at what the agent changed, beside testing it: findings of a linter, and lines out of style.

It happens outside of the sandbox, on the changes that reach grading: what the agent did to its own tools
there counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from etude.agent.tools.linters import HostRuff, new_findings
from etude.config import RewardConfig
from etude.errors.packages import missing_package
from etude.kit.syntax import read_text
from etude.kit.tasks import gather_bounded, off_loop
from etude.records import Task

_LINTED = (".py", ".pyi")
_LINTERS = 4
"""That run at once, however many files an agent changed."""


async def review_changes(
    task: Task, changes: Mapping[str, bytes | None], config: RewardConfig
) -> tuple[int, int]:
    """(new lints, new lines out of style), as far as `config` prices them; else 0.

    Raises InfrastructureError if the linter fails, ConfigError where there is none.
    """
    files = {path: data for path, data in changes.items() if data is not None}
    before = {path: task.files[path].encode() for path in files if path in task.files}
    lints = style = 0
    if config.lint_penalty > 0:
        python = [path for path in files if path.endswith(_LINTED)]

        async def count(path: str) -> int:
            linter = find_linter()
            found = await linter.lint(path, files[path])
            if not found or path not in before:
                return len(found)
            known = [finding.key for finding in await linter.lint(path, before[path])]
            return len(new_findings(found, known))

        lints = sum(await gather_bounded(count, python, _LINTERS))
    if config.style_penalty > 0:
        size = sum(map(len, files.values()))
        style = await off_loop(size, _count_style, before, files, config.style_columns)
    return lints, style


def _count_style(before: Mapping[str, bytes], after: Mapping[str, bytes], columns: int) -> int:
    return sum(
        count_foreign_lines(read_text(before.get(path)), text, columns)
        for path, data in after.items()
        if (text := read_text(data)) is not None
    )


def find_linter() -> HostRuff:
    """This machine's ruff. Raises MissingPackageError where there is none."""
    linter = HostRuff.find()
    if linter is None:
        raise missing_package(
            "counting lints", "ruff", field="rl.reward.lint_penalty", instead=", or set lint_penalty = 0"
        )
    return linter


def count_foreign_lines(before: str | None, after: str, columns: int) -> int:
    """Lines of `after` that are not in `before` (None: a new file) and differ in style from it. A line that
    was only moved is in both. Takes time linear in the two.

    Trailing white space; indentation by tabs where the file indents by spaces, or the other way round; more
    than `columns` characters where no line of the file had as many.
    """
    old = [] if before is None else before.splitlines()
    new = after.splitlines()
    tabs, spaces = _indents(old, "\t"), _indents(old, " ")
    wide = any(len(line) > columns for line in old)
    added = Counter(new) - Counter(old)
    return sum(
        times
        for line, times in added.items()
        if line != line.rstrip()
        or (line.startswith("\t") and spaces > tabs)
        or (line.startswith(" ") and tabs > spaces)
        or (len(line) > columns and not wide)
    )


def _indents(lines: list[str], character: str) -> int:
    return sum(line.startswith(character) for line in lines)
