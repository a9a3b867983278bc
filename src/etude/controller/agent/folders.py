"""Sessions on disk: one folder each, with the journal, the instructions, and each turn's changes.

~/.local/state/etude/sessions/20261121-142501-3fa2c1/
    session.json     the directory, the model, the approval mode, the user's instructions
    journal          every token, call and result (`etude.agent.journal`)
    changes/0003.json  the third change: saved before it is written to the repository
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from etude.controller.agent.changes import TurnChange
from etude.errors import ConfigError, StoreError
from etude.kit.durable import write_json

FORMAT = 1
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")


def sessions_directory() -> Path:
    """Directory of all sessions: `$XDG_STATE_HOME/etude/sessions`, else below `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "etude" / "sessions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """An instruction of the user."""

    text: str
    after_turn: int
    """Number of the agent's messages before it."""


@dataclass(frozen=True, slots=True)
class SessionMeta:
    """Metadata of a session, readable without its journal."""

    id: str
    path: str
    """The directory that it works on."""
    model: Mapping[str, Any]
    """The choice of its model (`ModelChoice`)."""
    mode: str
    """The approval mode when it was last used."""
    created_s: float
    prompts: tuple[Prompt, ...] = ()
    test_paths: tuple[str, ...] = ()
    """Paths of the tests that it can run, as of its start."""
    in_place: bool = False
    """Whether it works on the directory itself."""

    @property
    def title(self) -> str:
        """The first instruction, shortened to one line."""
        return " ".join(self.prompts[0].text.split())[:80] if self.prompts else ""


class SessionFolder:
    """One session's folder."""

    def __init__(self, path: Path, meta: SessionMeta) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.meta = meta

    @classmethod
    def create(
        cls, root: Path, tree: Path, model: Mapping[str, Any], mode: str, in_place: bool = False
    ) -> SessionFolder:
        """Creates a session. Raises StoreError if its folder cannot be made."""
        identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        meta = SessionMeta(identity, str(tree), dict(model), mode, time.time(), in_place=in_place)
        folder = cls(root / identity, meta)
        try:
            folder.path.mkdir(parents=True, mode=0o700)
            (folder.path / "changes").mkdir()
        except OSError as error:
            raise StoreError(
                "the session's folder cannot be created", field="path", received=str(error)
            ) from error
        folder._save()
        return folder

    @classmethod
    def open(cls, root: Path, identity: str) -> SessionFolder:
        """Opens a session by its id, or the one used last (`last`). Raises ConfigError, StoreError."""
        if identity == "last":
            metas = list_sessions(root)
            if not metas:
                raise ConfigError(
                    "there is no session yet", field="--resume", received=identity, fix="start one"
                )
            identity = metas[0].id
        path = root / identity
        if not _ID.fullmatch(identity) or not path.is_dir():
            raise ConfigError(
                "there is no such session", field="--resume", received=identity, fix="see etude agent --list"
            )
        return cls(path, _read_meta(path))

    def directory(self, named: Path | None) -> Path:
        """The directory that it works on. Raises ConfigError if another one was named."""
        path = Path(self.meta.path)
        if named is not None and named.resolve() != path:
            raise ConfigError(
                "the session works on another directory",
                field="PATH",
                received=str(named),
                fix=f"leave it out, or name {path}",
            )
        return path

    @property
    def journal(self) -> Path:
        """Path of the journal, which may not exist yet."""
        return self.path / "journal"

    def add_prompt(self, text: str, after_turn: int) -> int:
        """Saves an instruction; returns its number, from 1."""
        self.update(prompts=(*self.meta.prompts, Prompt(text, after_turn)))
        return len(self.meta.prompts)

    def update(self, **values: Any) -> None:
        """Changes fields of the metadata, and saves it."""
        self.meta = replace(self.meta, **values)
        self._save()

    def save_change(self, change: TurnChange) -> None:
        """Saves a turn's changes durably. Raises StoreError."""
        name = f"{change.number:04d}.json"
        try:
            write_json(self.path / "changes" / name, change.to_dict())
        except OSError as error:
            raise StoreError("the turn's changes cannot be saved", field=name, received=str(error)) from error

    def next_number(self) -> int:
        """The number of the next change."""
        return 1 + max((int(path.stem) for path in (self.path / "changes").glob("[0-9]*.json")), default=0)

    def changes(self) -> list[TurnChange]:
        """The changes of each turn, in order. Raises StoreError for a damaged file."""
        found: list[TurnChange] = []
        for path in sorted((self.path / "changes").glob("[0-9]*.json"), key=lambda path: int(path.stem)):
            try:
                found.append(TurnChange.from_dict(json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StoreError("is damaged", field=path.name, received=str(path.parent)) from error
        return found

    def _save(self) -> None:
        try:
            write_json(self.path / "session.json", {"format": FORMAT, **asdict(self.meta)})
        except OSError as error:
            raise StoreError(
                "the session cannot be saved", field="session.json", received=str(error)
            ) from error


def list_sessions(root: Path) -> list[SessionMeta]:
    """The sessions below `root`, last used first; damaged folders are skipped."""
    found: list[tuple[float, SessionMeta]] = []
    for path in root.glob("*-*-*") if root.is_dir() else ():
        try:
            used_s = max(
                (path / name).stat().st_mtime
                for name in ("session.json", "journal")
                if (path / name).exists()
            )
            found.append((used_s, _read_meta(path)))
        except (StoreError, ValueError, OSError):
            continue
    return [meta for _, meta in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _read_meta(path: Path) -> SessionMeta:
    try:
        document = json.loads((path / "session.json").read_text(encoding="utf-8"))
        if document.pop("format") != FORMAT:
            raise ValueError("another format")
        prompts = tuple(Prompt(**prompt) for prompt in document.pop("prompts"))
        tests = tuple(document.pop("test_paths"))
        return SessionMeta(**document, prompts=prompts, test_paths=tests)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError("the session is damaged", field="session.json", received=str(path)) from error
