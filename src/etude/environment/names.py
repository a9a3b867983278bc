"""Checks the names that clients give to tasks, runs and files, when a request arrives.

A task's name is part of trajectory ids, of paths in stores and of tables, so it is one or more words
separated by slashes; a word begins with a letter or a digit. `../..` is not a name, and neither is ``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from etude.errors import AgentError, UserError
from etude.sandbox.paths import normal_path
from etude.sandbox.template import Template

MAX_NAME_CHARACTERS = 200
_WORD = r"[A-Za-z0-9][A-Za-z0-9._+@:-]*"
_TASK = re.compile(rf"{_WORD}(/{_WORD})*")
_RUN = re.compile(_WORD)


def check_task_name(name: str, field: str = "task") -> str:
    """Returns the name. Raises UserError if it is not a name of a task, such as `../..`."""
    return _checked(_TASK, name, field, "words with slashes between them, as in org/fix-1")


def check_run_name(name: str) -> str:
    """Returns the name. Raises UserError if it is not a name of a run: one word, without slashes."""
    return _checked(_RUN, name, "run", "as in nightly-3")


def template_of(files: Mapping[str, str], field: str) -> Template:
    """A template of a client's files: distinct paths inside a workspace, none of them a directory of another.

    Raises UserError that names the path.
    """
    try:
        template = Template(files, "files")
    except UnicodeEncodeError as error:
        raise UserError(
            f"is not valid Unicode: {error.reason}", field=field, fix="send UTF-8 text"
        ) from error
    except (UserError, AgentError) as error:
        fix = error.fix or "name files in the workspace"
        raise UserError(error.message, field=field, received=error.received, fix=fix) from error
    if len(template.contents) < len(files):
        names = Counter(map(normal_path, files))
        twice = next(path for path in files if names[normal_path(path)] > 1)
        raise UserError("is sent twice", field=field, received=twice, fix="send it only once")
    return template


def _checked(grammar: re.Pattern[str], name: str, field: str, wanted: str) -> str:
    if len(name) > MAX_NAME_CHARACTERS or grammar.fullmatch(name) is None:
        raise UserError(
            "is not a valid name",
            field=field,
            received=name[:MAX_NAME_CHARACTERS],
            fix=f"use at most {MAX_NAME_CHARACTERS} characters: letters, digits and . _ + @ : -, {wanted}",
        )
    return name
