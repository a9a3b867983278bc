"""Ripgrep's `--glob` for files that the index knows, without asking the file system.

A glob is read as in a .gitignore file, turned round: one without `!` says what to search. `Globs` raises
`Unsure` at anything that it does not know for certain; ripgrep then searches the tree with its own globs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from etude.agent.index.grep.query import Unsure

__all__ = ["Globs"]


class Globs:
    """The globs of one query. The last one that matches decides."""

    def __init__(self, globs: Sequence[str]) -> None:
        """Raises Unsure."""
        self._rules = [_rule(glob) for glob in globs]
        self.only_named = any(wanted for _, wanted, _ in self._rules)
        """Some glob says what to search: other files are not searched, and hidden ones may be."""
        self._entered: dict[bytes, bool] = {b"": True}

    def verdict(self, path: bytes, is_directory: bool) -> bool | None:
        """Whether the globs want this entry; None if no glob speaks of it."""
        for regex, wanted, only_directories in reversed(self._rules):
            if (is_directory or not only_directories) and regex.fullmatch(path):
                return wanted
        return None

    def keeps(self, path: bytes) -> bool:
        """Whether ripgrep would search this listed file."""
        verdict = self.verdict(path, False)
        if verdict is None:
            verdict = not self.only_named
        return verdict and self.enters(path.rpartition(b"/")[0])

    def enters(self, directory: bytes) -> bool:
        """Whether ripgrep would walk down to this listed directory."""
        known = self._entered.get(directory)
        if known is None:
            above = self.enters(directory.rpartition(b"/")[0])
            known = self._entered[directory] = above and self.verdict(directory, True) is not False
        return known

    def brings_back(self, hidden: bytes) -> bool:
        """Whether ripgrep would look at an entry that its leading dot keeps out."""
        return (self.verdict(hidden, False) or self.verdict(hidden, True)) is True


def _rule(glob: str) -> tuple[re.Pattern[bytes], bool, bool]:
    """A regular expression over whole paths, whether it says what to search, whether only of directories."""
    if not glob or glob.startswith("#") or glob != glob.strip() or not glob.isascii():
        raise Unsure("a comment, spaces at an end, or characters whose bytes ripgrep counts one by one")
    wanted = not glob.startswith("!")
    body = glob.removeprefix("!")
    if body.startswith(("\\", "!", "#")) or body in ("", "/"):
        raise Unsure("escapes at the start")
    only_directories = body.endswith("/")
    body = body.removesuffix("/")
    anchored = body.startswith("/")
    body = body.removeprefix("/")
    if not anchored and "/" not in body and not body.startswith("**/"):
        body = "**/" + body
    if body.endswith("/**"):
        body += "/*"
    return re.compile(_translated(body), re.DOTALL), wanted, only_directories


def _translated(glob: str) -> bytes:
    """One glob as a regular expression. `*` and `?` stop at a slash, `**` as a name does not."""
    pieces: list[str] = []
    at = 0
    while at < len(glob):
        char = glob[at]
        if glob.startswith("**", at):
            piece, at = _stars(glob, at)
        elif char in "{}[],\\" or ord(char) < 32:
            piece, at = _special(glob, at)
        else:
            piece, at = {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)), at + 1
        pieces.append(piece)
    return "".join(pieces).encode()


def _stars(glob: str, at: int) -> tuple[str, int]:
    begins = at == 0 or glob[at - 1] == "/"
    if glob.startswith("**/", at) and begins and not glob.startswith("**/**", at):
        return "(?:[^/]*/)*", at + 3
    raise Unsure("stars beside other text")


def _special(glob: str, at: int) -> tuple[str, int]:
    """A class of letters and digits, or alternatives of plain text."""
    found = re.compile(r"\[(!|\^)?([A-Za-z0-9_.]+(?:-[A-Za-z0-9])?)\]").match(glob, at)
    if found is not None and not found[1]:
        first, hyphen, last = found[2][-3:].partition("-")
        if hyphen and first > last:
            raise Unsure("a range upside down")
        return found[0], found.end()
    found = re.compile(r"\{([\w.,*-]+)\}", re.ASCII).match(glob, at)
    if found is None or "**" in found[1] or "" in found[1].split(","):
        raise Unsure("class or alternatives")
    choices = [re.escape(choice).replace(r"\*", "[^/]*") for choice in found[1].split(",")]
    return f"(?:{'|'.join(choices)})", found.end()
