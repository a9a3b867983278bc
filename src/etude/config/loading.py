"""From TOML files and dotted overrides to a checked configuration, and back."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from etude.config.run import RunConfig
from etude.errors import ConfigError

Tree = dict[str, Any]


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Defaults < the TOML file at `path` < `overrides` such as `rl.num_steps=20`.

    Raises ConfigError, naming the field, what was received and what would do.
    """
    tree = _read_toml(path) if path is not None else {}
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> RunConfig:
    """Checks a tree of plain values. Raises ConfigError."""
    try:
        return RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        raise _explain(error) from None


def dump_config(config: RunConfig) -> str:
    """The whole configuration as TOML text that `load_config` reads back equal."""
    lines: list[str] = []
    _dump_section(config.model_dump(mode="json", exclude_none=True), (), lines)
    return "\n".join(lines).strip() + "\n"


def _read_toml(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "no such file",
            field="config",
            received=str(path),
            fix="name a TOML file, such as one in configs/",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", field="config", received=str(path), fix="name a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"not valid TOML: {error}", field="config", received=str(path), fix="mend the file's syntax"
        ) from None


def _apply_override(tree: Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            "not an override", field="override", received=override, fix="write section.field=value"
        )
    *sections, last = key.strip().split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError("is a value, not a section", field=section, received=override)
        node = cast(Tree, child)
    node[last] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    """A TOML value where it is one, otherwise the text itself, so that strings need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError) -> ConfigError:
    """The first problem of a validation, with a suggestion where a name is nearly right."""
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        names = _field_names(tuple(str(part) for part in problem["loc"][:-1]))
        close = difflib.get_close_matches(str(problem["loc"][-1]), names, n=1, cutoff=0.5)
        fix = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"
        return ConfigError("unknown key", field=field, received=problem["input"], fix=fix)
    message = problem["msg"].removeprefix("Value error, ")
    received = None if problem["type"] == "value_error" else problem["input"]
    return ConfigError(message, field=field or None, received=received)


def _field_names(sections: tuple[str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    names = iter(sections)
    for section in names:
        annotation = model.model_fields[section].annotation
        if get_origin(annotation) is dict:  # sections by names that the user gives
            next(names, None)
            annotation = get_args(annotation)[1]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _dump_section(tree: Tree, path: tuple[str, ...], lines: list[str]) -> None:
    values = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    if path and values:
        lines.extend(("", f"[{'.'.join(path)}]"))
    lines.extend(f"{key} = {_dump_value(value)}" for key, value in values.items())
    for key, value in tree.items():
        if isinstance(value, dict):
            _dump_section(cast(Tree, value), (*path, key), lines)


def _dump_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's strings are TOML's but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(_dump_value(item) for item in cast(list[Any], value))}]"
    return repr(value)
