"""Right and wrong edits of a file whose reference fix is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from etude.errors import TaskError
from etude.records import Task, ToolCall
from etude_quickstart.mutations import mutations


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces lines of a file, from `line` (from 1) on, by the same number of lines."""

    path: str
    line: int
    text: str

    @property
    def end(self) -> int:
        """The last line that is replaced."""
        return self.line + self.text.count("\n")

    def apply(self, text: Sequence[str]) -> list[str]:
        """The lines of the file afterwards."""
        return [*text[: self.line - 1], *self.text.split("\n"), *text[self.end :]]


class ReferenceFix:
    """The broken file of a task, with its current and its correct lines.

    Raises TaskError unless the reference fix changes lines of exactly one file and keeps their number.
    """

    def __init__(self, task: Task) -> None:
        if len(task.solution_files) != 1:
            raise TaskError(
                "must change exactly one file",
                field="solution_files",
                received=sorted(task.solution_files),
                fix="generate the task with TaskGenerator",
            )
        self.path, fixed = next(iter(task.solution_files.items()))
        self.broken = task.files.get(self.path, "").removesuffix("\n").split("\n")
        self.fixed = fixed.removesuffix("\n").split("\n")
        if len(self.broken) != len(self.fixed) or self.broken == self.fixed:
            raise TaskError(
                "must change lines and keep their number",
                field=f"solution_files[{self.path}]",
                received=f"{len(self.fixed)} lines for {len(self.broken)}",
                fix="generate the task with TaskGenerator",
            )
        self._changes = [
            (mutation.line, mutation.apply(fixed).split("\n")[mutation.line - 1])
            for mutation in mutations(fixed)
        ]
        """(line, a wrong text for it)"""

    def num_wrong_lines(self, text: Sequence[str]) -> int:
        """How many lines of `text` differ from the fixed file."""
        return len(self._wrong_lines(text))

    def _wrong_lines(self, text: Sequence[str]) -> list[int]:
        return [
            line for line, (now, right) in enumerate(zip(text, self.fixed, strict=True), 1) if now != right
        ]

    def right_edit(self, text: Sequence[str]) -> Edit:
        """Corrects the first wrong line."""
        line = self._wrong_lines(text)[0]
        return Edit(self.path, line, self.fixed[line - 1])

    def idle_edit(self, text: Sequence[str], rng: Random) -> Edit:
        """An edit that rewrites a correct line unchanged."""
        wrong = self._wrong_lines(text)
        lines = sorted({line for line, _ in self._changes}.difference(wrong)) or wrong
        line = rng.choice(lines)
        return Edit(self.path, line, text[line - 1])

    def wrong_edit(self, text: Sequence[str], rng: Random, other_line: float, misplaced: float) -> Edit:
        """An edit that leaves the file wrong: another line, the right text misplaced, or a wrong change.

        `other_line` and `misplaced` are the shares of the first two.
        """
        wrong = self._wrong_lines(text)[0]
        draw = rng.random()
        if draw < other_line:
            edits = [Edit(self.path, line, change) for line, change in self._changes if line != wrong]
        elif draw < other_line + misplaced:
            lines = sorted({line for line, _ in self._changes} - {wrong})
            edits = [Edit(self.path, line, self.fixed[wrong - 1]) for line in lines]
        else:
            edits = []
        edits = edits or [Edit(self.path, wrong, change) for line, change in self._changes if line == wrong]
        edits = [edit for edit in edits if edit.text != text[edit.line - 1]]
        return rng.choice(edits or [Edit(self.path, wrong, "    pass")])

    def rewritten(self, edit: Edit, text: Sequence[str], corrected: bool) -> Edit:
        """The edit as a rewrite of the function's whole body; with `corrected` other errors are fixed too.

        An edit above the body stays as it is.
        """
        first = body_start(text)
        if edit.line < first:
            return edit
        after = self.fixed if corrected else edit.apply(text)
        return Edit(self.path, first, "\n".join(after[first - 1 :]))

    def edit_of(self, call: ToolCall, text: Sequence[str] | None) -> Edit | None:
        """The edit that a call of `as_call` makes to `text`; None if the file was not read."""
        if text is None or call.arguments["path"] != self.path:
            return None
        if call.name == "edit_lines":
            return Edit(self.path, int(call.arguments["start"]), call.arguments["text"])
        old, new = call.arguments["old"], call.arguments["new"]
        line = next(number for number, entry in enumerate(text, 1) if old in entry)
        return Edit(self.path, line, text[line - 1].replace(old, new))


def body_start(lines: Sequence[str]) -> int:
    """The line, from 1, after the docstring of a file with one function; 1 where none is found."""
    ends = [number for number, line in enumerate(lines, 1) if line.rstrip().endswith('"""')]
    return ends[0] + 1 if ends and ends[0] < len(lines) else 1


def as_call(edit: Edit, text: Sequence[str], by_text: bool) -> ToolCall:
    """The edit as a tool call: by line number, or by the old text where that is unique and differs."""
    if edit.end > edit.line:
        lines = {"start": str(edit.line), "end": str(edit.end)}
        return ToolCall("edit_lines", {"path": edit.path, **lines, "text": edit.text})
    old, new = text[edit.line - 1].strip(), edit.text.strip()
    unique = "\n".join(text).count(old) == 1
    same_indentation = text[edit.line - 1].replace(old, new) == edit.text
    if by_text and old and old != new and unique and same_indentation:
        return ToolCall("search_replace", {"path": edit.path, "old": old, "new": new})
    return ToolCall("edit_lines", {"path": edit.path, "start": str(edit.line), "text": edit.text})
