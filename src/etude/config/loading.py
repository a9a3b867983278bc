"""Loads a validated configuration from TOML files and dotted overrides, and dumps it."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from etude.config.run import RunConfig
from etude.errors import ConfigError, UnknownKeyError
from etude.kit.toml import toml_text, toml_value

Tree = dict[str, Any]
AnySection = TypeVar("AnySection", bound=BaseModel)


def load_config(
    path: Path | None = None, overrides: Iterable[str] = (), dropped: Iterable[str] = ()
) -> RunConfig:
    """Defaults < the TOML file at `path` < `overrides` such as `rl.num_steps=20`.

    `dropped`: keys unknown to this version that are removed from the file's. Raises ConfigError with the
    field, the received value and a fix.
    """
    tree = read_toml(path) if path is not None else {}
    for key in dropped:
        drop_key(tree, key)
    changes = list(overrides)
    for override in changes:
        _apply_override(tree, override)
    config = parse_config(tree)
    _check_model_overrides(config, changes)
    return config


def drop_key(tree: Tree, key: str) -> Any:
    """Removes a dotted key from a tree; returns its value, or None if it is missing. Raises ConfigError for a
    known key: that always has a value."""
    *sections, last = key.split(".")
    if last in _field_names(RunConfig, tuple(sections)):
        raise ConfigError(
            "is still a valid key", field=key, fix=f"change it with --set {key}=..., or leave it"
        )
    node = tree
    for section in sections:
        child = node.get(section)
        if not isinstance(child, dict):
            return None
        node = cast(Tree, child)
    return node.pop(last, None)


def _check_model_overrides(config: RunConfig, overrides: Iterable[str]) -> None:
    """Refuses overrides of `model` with `initial_checkpoint`, whose config.json determines the model."""
    if config.initial_checkpoint is None:
        return
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip().startswith("model."):
            raise ConfigError(
                "has no effect: the config.json of initial_checkpoint determines the model",
                field=key.strip(),
                received=value.strip(),
                fix="remove it, or start without initial_checkpoint",
            )


def parse_config(tree: Mapping[str, Any]) -> RunConfig:
    """Validates a tree of plain values. Raises ConfigError."""
    return parse_section(RunConfig, dict(tree))


def load_section(kind: type[AnySection], path: Path) -> AnySection:
    """Loads a file that contains a single section of type `kind`. Raises ConfigError."""
    return parse_section(kind, read_toml(path))


def parse_section(kind: type[AnySection], tree: Tree) -> AnySection:
    """Validates plain values as a section of type `kind`. Raises ConfigError."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, kind) from None


def dump_config(config: RunConfig) -> str:
    """The whole configuration as TOML text that `load_config` reads back equal."""
    return toml_text(config.model_dump(mode="json", exclude_none=True))


def read_toml(path: Path) -> Tree:
    """The plain values of a TOML file. Raises ConfigError if it is missing or invalid."""
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
            f"is not valid TOML: {error}", field="config", received=str(path), fix="correct the file's syntax"
        ) from None


def _apply_override(tree: Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            "is not of the form KEY=VALUE",
            field="override",
            received=override,
            fix="write section.field=value",
        )
    *sections, last = key.strip().split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError("is a key, not a section", field=section, received=override)
        node = cast(Tree, child)
    node[last] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    """Parses a TOML value; other text is a string, so that strings need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: ValidationError, kind: type[BaseModel]) -> ConfigError:
    """A ConfigError for the first problem of a validation, with a suggestion for a mistyped name."""
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        names = _field_names(kind, tuple(str(part) for part in problem["loc"][:-1]))
        close = difflib.get_close_matches(str(problem["loc"][-1]), names, n=1, cutoff=0.5)
        fix = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"
        return UnknownKeyError("unknown key", field=field, received=problem["input"], fix=fix)
    message = problem["msg"].removeprefix("Value error, ")
    received = None if problem["type"] == "value_error" else problem["input"]
    return ConfigError(message, field=field or None, received=received, fix=_default(kind, problem["loc"]))


def _default(kind: type[BaseModel], place: tuple[int | str, ...]) -> str | None:
    """A fix that names the default of the field at `place`, or of the field around it; None for a section."""
    try:
        node: Any = kind().model_dump(mode="json")
    except ValidationError:  # it has fields that must be given
        return None
    names: list[str] = []
    for part in place:
        if not isinstance(node, dict) or part not in node:
            break
        node = cast(Tree, node)[str(part)]
        names.append(str(part))
    if isinstance(node, dict):
        return None
    by_default = "" if node is None else f": {'.'.join(names)} is {toml_value(node)} by default"
    return f"give another value, or leave it out{by_default}"


def _field_names(model: type[BaseModel], sections: tuple[str, ...]) -> list[str]:
    names = iter(sections)
    for section in names:
        if section not in model.model_fields:
            return []
        annotation = model.model_fields[section].annotation
        if get_origin(annotation) is dict:  # sections by names that the user gives
            next(names, None)
            annotation = get_args(annotation)[1]
        elif get_origin(annotation) is tuple:  # sections in a list
            next(names, None)
            annotation = get_args(annotation)[0]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
