"""Prints the fields of Harbor's model of `task.toml`, a dotted path a line. Harbor must be on PYTHONPATH."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


def fields(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> Iterator[str]:
    """The paths of a model's fields, and of the models in them."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for below in models_in(field.annotation):
            if below not in above:
                yield from fields(below, f"{prefix}{name}.", (*above, below))


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """The models that a type is made of."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in typing.get_args(kind):
        yield from models_in(part)


def main() -> None:
    """Prints them, sorted."""
    module = importlib.import_module("harbor.models.task.config")
    names = ("EnvironmentConfig", "VerifierConfig", "StepConfig", "TaskConfig")
    models: list[type[BaseModel]] = [getattr(module, name) for name in names]
    for model in models:
        model.model_rebuild(force=True)  # they name each other before they are defined
    print("\n".join(sorted(set(fields(models[-1], "", (models[-1],))))))


if __name__ == "__main__":
    main()
