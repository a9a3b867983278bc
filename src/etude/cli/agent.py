"""`etude agent`: the trained agent on files of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from etude.cli.exits import error_console
from etude.cli.output import output_console, print_json, shown
from etude.cli.progress import open_observer
from etude.errors import UserError
from etude.observe import RunDirectory
from etude.observe.files import write_text

DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def agent_command(
    run: Annotated[Path, typer.Option("--run", help="Run directory of the trained agent.")],
    path: Annotated[Path, typer.Argument(help="Directory to work on.")],
    instruction: Annotated[str, typer.Option(help="What to do.")] = "make the tests pass",
    apply: Annotated[bool, typer.Option("--apply", help="Write the agent's changes back.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the session as JSON.")] = False,
) -> None:
    """Let the agent work on a copy of PATH in its sandbox; show what it did and its diff."""
    directory = RunDirectory.open(run)
    if not path.is_dir():
        raise UserError("is not a directory", field="PATH", received=str(path), fix="name a directory")
    # Heavy: torch comes with it.
    from etude.controller.agent import run_agent

    session = run_agent(directory, path, instruction, open_observer())
    if as_json:
        print_json(session)
    else:
        print_session(output_console(), session)
    files: Mapping[str, str | None] = session.get("files", {})
    if apply:
        apply_changes(path, files)
        error_console().print(f"{len(files)} files changed in {path}", markup=False)
    elif files:
        error_console().print("nothing was written; --apply writes these changes back")
    else:
        error_console().print("the agent changed no file")


def print_session(console: Console, session: Mapping[str, Any]) -> None:
    """Turns, results and the coloured diff."""
    for number, turn in enumerate(session.get("turns", ()), start=1):
        console.print(Text(f"turn {number}", style="bold cyan"))
        console.print(shown(str(turn["text"])))
        for result in turn["results"]:
            console.print(shown(str(result), "dim"))
        console.print()
    for line in str(session.get("diff", "")).splitlines():
        console.print(shown(line, DIFF_STYLES.get(line[:1], "")), soft_wrap=True)
    console.print(Text(f"status: {session.get('status', '')}"))


def apply_changes(root: Path, files: Mapping[str, str | None]) -> None:
    """Writes each text to its path under `root`; None removes the file.

    Checks every path before it writes any. Raises UserError for a path that leaves `root`.
    """
    base = root.resolve()
    targets = {name: (base / name).resolve() for name in files}
    for name, target in targets.items():
        if not target.is_relative_to(base) or target == base:
            raise UserError("leads out of the directory; nothing was written", field="files", received=name)
    for name, text in files.items():
        if text is None:
            targets[name].unlink(missing_ok=True)
        else:
            targets[name].parent.mkdir(parents=True, exist_ok=True)
            write_text(targets[name], text)
