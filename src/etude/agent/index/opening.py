"""Code indexes by the name that a command line gives them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from etude.agent.index.templates import Report, TemplateIndexes
from etude.errors import ConfigError
from etude.sandbox.migration import default_state_directory

INDEX_KINDS = ("off", "words", "meaning")


def new_indexes(
    kind: str, state: Path | None = None, report: Report = lambda words: None
) -> TemplateIndexes | None:
    """`off`: None. `words`: instant grep, and search by words. `meaning`: with embeddings as well.

    To be closed by the caller. Raises ConfigError for another kind, MissingPackageError where `meaning`
    lacks its model.
    """
    if kind not in INDEX_KINDS:
        raise ConfigError(
            "no such index", field="index", received=kind, fix="one of " + ", ".join(INDEX_KINDS)
        )
    if kind == "off":
        return None
    embedder = None
    if kind == "meaning":
        # Heavy: the model's libraries come with it.
        from etude.agent.index.semantic import default_embedder

        embedder = default_embedder()
    return TemplateIndexes(state or default_state_directory() / "index", embedder, report)


@contextlib.asynccontextmanager
async def open_indexes(kind: str, state: Path | None = None) -> AsyncIterator[TemplateIndexes | None]:
    """`new_indexes`, closed at the end."""
    indexes = new_indexes(kind, state)
    try:
        yield indexes
    finally:
        if indexes is not None:
            await indexes.close()
