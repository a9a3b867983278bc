"""Runs ruff over the content of files: the sandbox's if it has one, else the host's.

In the sandbox the repository's own configuration applies. On the host none does, and no file of the host is
read: content is passed by standard input, and the rules are a few that are undisputed. Either way the same
linter checks a file's original and its current content.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from etude.agent.tools.interface import shown
from etude.errors import InfrastructureError
from etude.sandbox.errors import Unsupported
from etude.sandbox.interface import Sandbox

LINT_S = 30.0
"""Time limit per file."""
_OUTPUT_BYTES = 4 << 20
_OPTIONS = ("--no-cache", "--exit-zero", "--output-format=json")
_HOST_RULES = "--select=E4,E7,E9,F"
"""Errors of syntax and names, plain mistakes: listed here, since ruff's defaults change with versions."""
_NOT_LINTED = "not-linted"
_SUFFIXES = (".py", ".pyi")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a linter."""

    line: int
    """From 1."""
    rule: str
    message: str
    text: str
    """The source line, without blanks at its ends."""

    @property
    def key(self) -> str:
        """Identifies a finding across moved lines: its rule and the text of its line."""
        return f"{self.rule}\t{self.text}"


class Linter(Protocol):
    """Checks the content of one file."""

    async def lint(self, path: str, content: bytes) -> list[Finding]:
        """Findings in the order of lines. A file that cannot be linted gives a finding too.

        Raises InfrastructureError.
        """
        ...


class SandboxRuff:
    """The sandbox's own ruff with the repository's configuration."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @classmethod
    async def find(cls, sandbox: Sandbox) -> SandboxRuff | None:
        """None if the sandbox has no ruff, or runs no commands."""
        try:
            result = await sandbox.commands.run("ruff --version", LINT_S)
        except Unsupported:
            return None
        return cls(sandbox) if result.exit_code == 0 else None

    async def lint(self, path: str, content: bytes) -> list[Finding]:
        """See Linter. A linter that fails here is the repository's fault: a finding."""
        line = f"ruff check {' '.join(_OPTIONS)} --force-exclude --stdin-filename={shlex.quote(path)} -"
        result = await self._sandbox.commands.run(line, LINT_S, limit_bytes=_OUTPUT_BYTES, stdin=content)
        if result.timed_out or result.exit_code != 0:
            words = "took too long" if result.timed_out else result.stderr.strip().partition("\n")[0]
            return [Finding(1, _NOT_LINTED, words or f"exit {result.exit_code}", "")]
        return parse_findings(result.stdout, content)


class HostRuff:
    """This machine's ruff, with a fixed set of undisputed rules."""

    def __init__(self, program: Path, rules: str = _HOST_RULES) -> None:
        self._program, self._rules = program, rules

    @classmethod
    def find(cls, rules: str = _HOST_RULES) -> HostRuff | None:
        """The one next to this interpreter, else that on the PATH; None if there is none."""
        bundled = Path(sys.executable).with_name("ruff")
        found = str(bundled) if bundled.is_file() else shutil.which("ruff")
        return None if found is None else cls(Path(found), rules)

    async def lint(self, path: str, content: bytes) -> list[Finding]:
        """See Linter. Raises InfrastructureError if ruff refuses to run."""
        found = await self.report(path, content)
        return [found] if isinstance(found, Finding) else parse_findings(found, content)

    async def report(self, path: str, content: bytes) -> str | Finding:
        """ruff's JSON on a content, or why there is none. Raises InfrastructureError."""
        try:
            content.decode()
        except UnicodeDecodeError:
            return Finding(1, _NOT_LINTED, "not UTF-8", "")
        process = await asyncio.create_subprocess_exec(
            self._program,
            "check",
            "--isolated",
            "--ignore-noqa",
            self._rules,
            *_OPTIONS,
            f"--stdin-filename={path}",
            "-",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env={"RAYON_NUM_THREADS": "1"},
        )
        try:
            async with asyncio.timeout(LINT_S):
                out, err = await process.communicate(content)
        except TimeoutError:
            return Finding(1, _NOT_LINTED, "took too long", "")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 2:
            raise InfrastructureError(
                f"the linter failed: {err.decode(errors='replace')[:200]}", field="ruff", received=path
            )
        if process.returncode != 0:
            # Ended by a signal: it crashed on the agent's file.
            return Finding(1, _NOT_LINTED, "the linter cannot read it", "")
        return out.decode(errors="replace")


def is_linted(path: str) -> bool:
    """Whether a file is of a language that is linted."""
    return path.endswith(_SUFFIXES)


def parse_findings(output: str, content: bytes) -> list[Finding]:
    """The findings in ruff's JSON, with the texts of their lines; invalid output is a finding itself."""
    try:
        rows = json.loads(output)
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, list):
        return [Finding(1, _NOT_LINTED, "the linter gave no findings that can be read", "")]
    lines = content.decode(errors="replace").split("\n")
    return sorted((_finding(row, lines) for row in rows), key=lambda finding: finding.line)


def new_findings(now: Iterable[Finding], before: Sequence[str]) -> list[Finding]:
    """Those of `now` that are not in `before`, counted: of one found twice and now thrice, one is new."""
    known = Counter(before)
    new: list[Finding] = []
    for finding in now:
        if known[finding.key] > 0:
            known[finding.key] -= 1
        else:
            new.append(finding)
    return new


def _finding(row: Any, lines: Sequence[str]) -> Finding:
    row = row if isinstance(row, dict) else {}
    location = row.get("location")
    number = location.get("row") if isinstance(location, dict) else None
    number = number if isinstance(number, int) and number > 0 else 1
    text = lines[number - 1].strip() if number <= len(lines) else ""
    return Finding(
        number,
        shown(str(row.get("code") or "syntax"))[:40],
        shown(" ".join(str(row.get("message") or "").split())),
        text,
    )
