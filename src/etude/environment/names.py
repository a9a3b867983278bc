"""Names that clients give to tasks, runs and files: one grammar, checked where a request comes in.

A task's name stands in ids of trajectories, in paths of stores and in tables, so it is one or more words
with slashes between them; a word begins with a letter or a digit. `../..` is none, and neither is ``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from etude.errors import UserError
from etude.sandbox.paths import normal_path

MAX_NAME_CHARACTERS = 200
MAX_PATH_BYTES = 4000
MAX_PARTS = 100
MAX_PART_BYTES = 255
"""Of one part of a path: what file systems take."""
_WORD = r"[A-Za-z0-9][A-Za-z0-9._+@:-]*"
_TASK = re.compile(rf"{_WORD}(/{_WORD})*")
_RUN = re.compile(_WORD)


def check_task_name(name: str, field: str = "task") -> str:
    """The name itself. Raises UserError for what is no name of a task, such as `../..`."""
    return _checked(
        _TASK,
        name,
        field,
        "letters, digits and . _ + @ : -, words with slashes between them, as in org/fix-1",
    )


def check_run_name(name: str, field: str = "run") -> str:
    """The name itself. Raises UserError for what is no name of a run: one word, without slashes."""
    return _checked(_RUN, name, field, "letters, digits and . _ + @ : -, as in nightly-3")


def check_files(files: Mapping[str, str], field: str) -> Mapping[str, str]:
    """The files themselves: paths inside a workspace, each once, none of them a directory of another's.

    Raises UserError that names the path.
    """
    seen: dict[str, str] = {}
    for path, text in files.items():
        _check_characters(path, text, field)
        normal = normal_path(path)
        if normal.count("/") >= MAX_PARTS:
            raise UserError(
                "lies too deep", field=field, received=path, fix=f"at most {MAX_PARTS} names in one path"
            )
        if normal == "." or path.endswith("/"):
            raise UserError("names no file", field=field, received=path, fix="a path such as lib/a.py")
        if normal in seen:
            raise UserError(
                f"is the same file as {seen[normal]!r}", field=field, received=path, fix="send one of the two"
            )
        seen[normal] = path
    folders: set[str] = set()
    for normal, path in seen.items():
        above = normal.rpartition("/")[0]
        while above and above not in folders:
            folders.add(above)
            if above in seen:
                raise UserError(
                    f"{above!r} is sent as a file, and cannot be a directory as well",
                    field=field,
                    received=path,
                    fix=f"leave one of the two out, or name {above!r} otherwise",
                )
            above = above.rpartition("/")[0]
    return files


def _check_characters(path: str, text: str, field: str) -> None:
    """Raises UserError for what no file can be called or hold."""
    try:
        text.encode()
        data = path.encode()
    except UnicodeEncodeError:
        raise UserError(
            "holds half a character (a lone surrogate)",
            field=field,
            received=repr(path),
            fix="send UTF-8 text",
        ) from None
    if "\0" in path or len(data) > MAX_PATH_BYTES or max(map(len, data.split(b"/"))) > MAX_PART_BYTES:
        raise UserError(
            "is no path",
            field=field,
            received=path[:MAX_PART_BYTES],
            fix=f"no NUL, at most {MAX_PART_BYTES} bytes from slash to slash",
        )


def _checked(grammar: re.Pattern[str], name: str, field: str, wanted: str) -> str:
    if len(name) > MAX_NAME_CHARACTERS or grammar.fullmatch(name) is None:
        raise UserError(
            "is no name",
            field=field,
            received=name[:MAX_NAME_CHARACTERS],
            fix=f"at most {MAX_NAME_CHARACTERS} characters: {wanted}",
        )
    return name
