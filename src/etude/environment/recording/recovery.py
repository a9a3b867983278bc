"""Live sessions that a server left behind: from their journals back into a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.environment.recording.journal import SessionJournal, read_journal, replay
from etude.environment.recording.session_map import MapLimits, SessionMap
from etude.environment.recording.spec import SamplingDefaults, SessionSpec
from etude.errors import ConfigError, StoreError
from etude.records import RewardBreakdown, SamplingParams, TrajectoryId
from etude.tokens.chat.shelf import RendererShelf

LIVE = "live"
"""Directory of the journals, in the store's."""


class Found:
    """A session as its journal tells it."""

    def __init__(
        self, journal: SessionJournal, described: Mapping[str, Any], session_map: SessionMap
    ) -> None:
        self.journal = journal
        self.map = session_map
        self.id: str = described["id"]
        self.key: str = described["key"]
        self.tenant: str = described["tenant"]
        self.spec = spec_of(described["spec"])
        self.age_s = max(time.time() - float(described["created_unix_s"]), 0.0)
        self.reward: RewardBreakdown | None = None


def session_document(
    session_id: str, key: str, tenant: str, spec: SessionSpec, limits: MapLimits, renderers: RendererShelf
) -> dict[str, Any]:
    """What a session is before anybody asks it something, as plain JSON values."""
    return {
        "id": session_id,
        "key": key,
        "tenant": tenant,
        "spec": asdict(spec),
        "limits": asdict(limits),
        "renderers": renderers.digest,
        "created_unix_s": time.time(),
    }


def spec_of(document: Mapping[str, Any]) -> SessionSpec:
    """The spec in what `session_document` gave. Raises KeyError or TypeError for anything else."""
    sampling = document["sampling"]
    fixed = sampling["fixed"]
    return SessionSpec(
        **{
            **document,
            "trajectory_id": TrajectoryId(**document["trajectory_id"]),
            "sampling": SamplingDefaults(
                None if fixed is None else SamplingParams(**fixed), sampling["max_tokens"]
            ),
        }
    )


def find_sessions(folder: Path, renderers: RendererShelf) -> Iterator[Found]:
    """The sessions of the journals in a folder that no other process holds, oldest first.

    A journal without a whole line belongs to a session that nobody was told of: it is removed. Raises
    StoreError for a damaged one, and ConfigError for one of another model: its tokens mean something else.
    """
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: (_written_s(path), path.name))
    for path in paths:
        taken = read_journal(path)
        if taken is None:
            continue
        journal, lines = taken
        if not lines:
            journal.remove()
            continue
        try:
            yield _found(journal, lines, renderers)
        except BaseException:
            journal.close()
            raise


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has just ended its session
        return 0.0


def _found(journal: SessionJournal, lines: list[dict[str, Any]], renderers: RendererShelf) -> Found:
    described = lines[0]
    if described["renderers"] != renderers.digest:
        raise ConfigError(
            "a live session was recorded with another tokenizer, grammar or template",
            field="store",
            received=str(journal.path),
            fix="serve the model that it began with, or move the file out of the way",
        )
    try:
        spec = spec_of(described["spec"])
        session_map = SessionMap(
            str(spec.trajectory_id),
            renderers.find,
            MapLimits(**described["limits"]),
            spec.keep_thinking,
        )
        found = Found(journal, described, session_map)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            "the journal makes no sense",
            field="store",
            received=f"{journal.path}: {error!r}",
            fix="move it out of the way",
        ) from error
    found.reward = replay(lines[1:], session_map)
    return found
