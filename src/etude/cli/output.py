"""Tables and texts on standard output, shared by the commands."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.cli.agent_output import OutputConsole

if TYPE_CHECKING:
    # Heavy at run time: matplotlib comes with it.
    from etude.observe.report import Comparison, Suggestion

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}
# C0 and C1 controls but tab and newline, each as its picture or as a replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)}
_VISIBLE |= {127: 0x2421, **dict.fromkeys(range(128, 160), 0xFFFD)}
# Halves of characters and bytes of names that are no text: no terminal's encoding has them.
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def output_console() -> Console:
    """A new console on standard output, so that it follows redirections."""
    return OutputConsole()


def shown(text: str, style: str = "") -> Text:
    """Text of an agent for a terminal: control characters, which could control it, become visible."""
    return Text(text.translate(_VISIBLE), style=style)


def print_diff(console: Console, lines: Iterable[str], indent: str = "") -> None:
    """Prints the lines of a diff in colour."""
    for line in lines:
        console.print(shown(indent + line, _DIFF_STYLES.get(line[:1], "")), soft_wrap=True)


def program() -> str:
    """The command that runs this program: its name, or `.venv/bin/etude` if it is not on the path."""
    installed, here = Path(sys.executable).with_name("etude"), Path.cwd()
    is_near = not shutil.which("etude") and installed.is_relative_to(here)
    return str(installed.relative_to(here)) if is_near else "etude"


def print_json(value: Any) -> None:
    """Prints a value as indented JSON."""
    typer.echo(json.dumps(value, indent=2))


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Iterable[object]],
    right: Collection[int] = (),
    title: str | None = None,
) -> None:
    """Prints a table, with headings if there are any. A cell that is None is empty. `right`: indices of
    right-aligned columns."""
    style: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": None, "pad_edge": False}
    table = Table(title=title, show_header=any(headings), **style)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        cells = ("" if cell is None else cell for cell in row)
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
    console.print(table)


def print_comparisons(console: Console, title: str, rows: Sequence[Comparison]) -> None:
    """Prints before, after and change, one row per figure."""
    if not rows:
        return
    lines: list[tuple[object, ...]] = []
    for row in rows:
        label = Text(f"  {row.label}" if row.detail else row.label, style="dim" if row.detail else "")
        before, after, change = row.cells()
        lines.append((label, before, Text(after, style="bold"), change))
    print_table(console, ("", "before", "after", "change"), lines, range(1, 4), title)
    console.print()


def print_examples(console: Console, examples: Sequence[Mapping[str, Any]]) -> None:
    """Prints sessions before and after training in two columns; long lines are wrapped, in pipes too."""
    for example in examples:
        title = shown(str(example.get("title") or example.get("task", "")))
        table = Table(title=title, width=min(console.width, 160))
        table.add_column("before", ratio=1, overflow="fold")
        table.add_column("after", ratio=1, overflow="fold")
        table.add_row(shown(str(example.get("before", ""))), shown(str(example.get("after", ""))))
        console.print(table)
        console.print()


def print_suggestions(console: Console, suggestions: Sequence[Suggestion]) -> None:
    """Prints suggestions of what to try next, with the commands."""
    console.print(Text("what to try next", style="bold"))
    for suggestion in suggestions:
        console.print(Text(f"  {suggestion.reason}"))
        console.print(Text(f"    {suggestion.command}", style="cyan"), soft_wrap=True)
