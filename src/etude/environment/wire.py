"""Encodes messages between environment server and client as plain JSON values, and decodes them exactly."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from etude.agent.inputs import call_document, result_document, result_of
from etude.environment.grading import Outcome
from etude.errors import UserError
from etude.records import Status, Task, ToolCall, ToolResult
from etude.serving.errors import plain
from etude.serving.messages import Fields, check_fields, check_strings

MAX_CALLS = 256
"""Most calls in one turn that a server accepts."""
MAX_PATTERNS = 256
MAX_PATTERN_CHARACTERS = 256
MAX_TEST_CHARACTERS = 1 << 18
"""Limit for one file of hidden tests: while Python parses it, the event loop is blocked."""
_NONE = type(None)
_CALL: Fields = {"name": (str,), "arguments": (dict, _NONE), "error": (str, _NONE)}
_RESULT: Fields = {
    "output": (str,),
    "error": (str, _NONE),
    "finished": (bool,),
    "duration_s": (float,),
    "facts": (dict,),
}
_TASK: Fields = dict.fromkeys((part.name for part in fields(Task)), (object,))
_TASK_TYPE = TypeAdapter(Task)
OUTCOME = TypeAdapter(Outcome)


def calls_of(raw: Sequence[object]) -> list[ToolCall]:
    """Decodes calls, written by `call_document` or by hand. Raises UserError that names the invalid field."""
    if len(raw) > MAX_CALLS:
        raise UserError("too many calls", field="calls", received=len(raw), fix=f"send {MAX_CALLS} at most")
    calls: list[ToolCall] = []
    for entry in raw:
        named = check_fields(entry, _CALL)
        arguments = named.get("arguments") or {}
        check_strings([*arguments.values()], "calls.arguments")
        calls.append(ToolCall(named["name"], arguments, named.get("error")))
    return calls


def known_of(raw: Mapping[str, object]) -> dict[int, ToolResult]:
    """Decodes results by position. Raises UserError."""
    try:
        return {int(place): result_of(check_fields(result, _RESULT)) for place, result in raw.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"are not valid results: {error}", field="known", fix="send results as they were received"
        ) from error


def turn_document(
    number: int | None, calls: Sequence[ToolCall], known: Mapping[int, ToolResult]
) -> dict[str, Any]:
    """The request to run a turn."""
    return {
        "turn": number,
        "calls": [call_document(call) for call in calls],
        "known": {str(place): result_document(result) for place, result in known.items()},
    }


def task_document(task: Task) -> dict[str, Any]:
    """The whole task, without its directory. It includes the reference solution, which grading needs."""
    document = asdict(task)
    del document["directory"]
    for part in (document, *document["steps"]):
        _recode(part, lambda data: base64.b64encode(data).decode())
    return {key: list(value) if isinstance(value, tuple) else value for key, value in document.items()}


def task_of(raw: object) -> Task:
    """Inverse of `task_document`. Raises UserError that names the invalid field."""
    named = {name: value for name, value in check_fields(raw, _TASK).items() if value is not None}
    named.pop("directory", None)
    try:
        named = copy.deepcopy(named)
        for part in (named, *named.get("steps", ())):
            _recode(part, _unpacked)
        task = _TASK_TYPE.validate_python(named)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(
            f"is invalid: {first['msg']}",
            field=f"task.{first['loc'][0]}",
            received=plain(first["input"]),
            fix="send it as `task_document` writes it",
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"is invalid: {error}", field="task", fix="send it as `task_document` writes it"
        ) from error
    _check_sizes(task)
    return task


def _unpacked(text: Any) -> bytes | None:
    """The bytes of an archive; for invalid Base64 None, which validation then refuses."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _recode(part: dict[str, Any], code: Callable[[Any], object]) -> None:
    """Converts the archives in the fields of a task, step or script, in place."""
    for record in (part, part.get("verifier"), part.get("solution")):
        for key in ("archive", "files"):
            if record and isinstance(record.get(key), str | bytes):
                record[key] = code(record[key])


def _check_sizes(task: Task) -> None:
    """Raises UserError for a task whose grading would block the sessions of others."""
    patterns = task.allowed_paths
    if len(patterns) > MAX_PATTERNS or any(len(pattern) > MAX_PATTERN_CHARACTERS for pattern in patterns):
        raise UserError(
            "too many patterns, or one is too long",
            field="task.allowed_paths",
            received=len(patterns),
            fix=f"send at most {MAX_PATTERNS} of {MAX_PATTERN_CHARACTERS} characters",
        )
    for path in task.hidden_test_paths:
        if len(task.hidden_files.get(path, "")) > MAX_TEST_CHARACTERS:
            raise UserError(
                "is too long for a file of tests",
                field="task.hidden_files",
                received=path,
                fix=f"split it into files of at most {MAX_TEST_CHARACTERS} characters",
            )


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """The document of a session's outcome, with its total reward."""
    return OUTCOME.dump_python(outcome, mode="json") | {"total": outcome.reward.total}


def status_of_text(text: str | None) -> Status | None:
    """A session's status by its value. Raises UserError."""
    if text is None:
        return None
    try:
        return Status(text)
    except ValueError:
        raise UserError(
            "unknown status", field="status", received=text, fix=", ".join(status.value for status in Status)
        ) from None
