"""The store on disk: records and vectors by content, states by tree.

    store.sqlite             records of file contents, places of vectors, the present state of each tree
    vectors-<model>-<g>.i8   rows of vectors (vectors.py), generation g
    states/<id>/             arrays of a state (state.py)

Everything is keyed by content, so a second checkout of nearly the same tree finds its records and vectors
here. SQLite (write-ahead log) decides what is there: rows are on disk before their places are committed,
states before their names. A process that dies leaves at most rows and folders that nobody names; the next
writer takes them away. Any number of processes may read and write.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.agent.index.semantic.embedding import Vectors
from etude.agent.index.semantic.records import FileRecord, read_record, write_record
from etude.agent.index.semantic.state import NO_ROW, TreeState, load_state, save_state
from etude.agent.index.semantic.vectors import VectorFile, append_rows, pack_rows, row_type
from etude.errors import StoreError
from etude.kit.retry import Backoff, retry

__all__ = ["RecordsGoneError", "SemanticStore"]

STORE_VERSION = 1
_BUSY_TIMEOUT_S = 60.0
_AT_ONCE = 500
"""Keys of one SQL statement."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS models (model TEXT PRIMARY KEY, dimension INTEGER NOT NULL,
    generation INTEGER NOT NULL, num_rows INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS vectors (model TEXT, hash BLOB, place INTEGER NOT NULL,
    PRIMARY KEY (model, hash)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS states (tree TEXT, model TEXT, folder TEXT NOT NULL,
    PRIMARY KEY (tree, model)) WITHOUT ROWID;
"""


class RecordsGoneError(StoreError):
    """Records that a state needs were pruned before it was published."""


class SemanticStore:
    """A folder, made where it is missing. Its methods block and may be called by several threads.

    Raises `StoreError` if the folder is of another version, damaged or busy for a minute.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        (folder / "states").mkdir(parents=True, exist_ok=True)
        with _told(folder):
            self._database = sqlite3.connect(
                folder / "store.sqlite",
                timeout=_BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._prepare()
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        with self._writing() as database:
            for statement in _SCHEMA.split(";"):
                database.execute(statement)
            database.execute("INSERT OR IGNORE INTO facts VALUES ('version', ?)", (STORE_VERSION,))
            (version,) = database.execute("SELECT value FROM facts WHERE name = 'version'").fetchone()
        if version != STORE_VERSION:
            raise StoreError(
                "the code index was written by another version", received=version, fix=f"delete {self.folder}"
            )

    def close(self) -> None:
        """Closes the database; mapped vectors stay readable."""
        with self._lock:
            self._database.close()

    # Records

    def records(self, keys: Iterable[bytes]) -> dict[bytes, FileRecord]:
        """Those records that are there."""
        return {
            key: read_record(data)
            for key, data in self._find("SELECT key, data FROM records WHERE key", keys)
        }

    def add_records(self, records: Mapping[bytes, FileRecord]) -> None:
        """Keeps records; one that is there already stays."""
        packed = [(key, write_record(record)) for key, record in records.items()]
        with self._writing() as database:
            database.executemany("INSERT OR IGNORE INTO records VALUES (?, ?)", packed)

    # Vectors

    def places(self, model: str, hashes: NDArray[np.uint8]) -> tuple[NDArray[np.int32], int]:
        """([hashes] row of each vector or -1, generation of the file they are rows of)."""
        names = [row.tobytes() for row in hashes]
        with self._lock, _told(self.folder):
            # One transaction: rows and generation have to be of one moment.
            self._database.execute("BEGIN")
            try:
                generation = self._model(model)[1]
                found = dict(
                    self._select("SELECT hash, place FROM vectors WHERE model = ? AND hash", names, model)
                )
            finally:
                self._database.execute("COMMIT")
        return np.array([found.get(name, NO_ROW) for name in names], dtype=np.int32), generation

    def located(self, model: str, state: TreeState) -> TreeState:
        """`state` with the places of all vectors that are there by now; "" is no model, which has none."""
        if not model:
            return state
        missing = np.flatnonzero(state.rows == NO_ROW)
        found, generation = self.places(model, state.hashes[missing])
        if generation != state.generation:
            return state.with_rows(*self.places(model, state.hashes))
        rows = np.array(state.rows)
        rows[missing] = found
        return state.with_rows(rows, generation)

    def add_vectors(self, model: str, hashes: Sequence[bytes], vectors: Vectors) -> None:
        """Appends the vectors that are not there yet, durably."""
        with self._writing() as database:
            dimension, generation, num_rows = self._model(model)
            if dimension not in (0, vectors.shape[1]):
                raise StoreError("vectors of another dimension under the same key", received=vectors.shape[1])
            known = {
                name
                for name, _ in self._select(
                    "SELECT hash, 1 FROM vectors WHERE model = ? AND hash", hashes, model
                )
            }
            new = {name: index for index, name in enumerate(hashes) if name not in known}
            rows = pack_rows(vectors[list(new.values())])
            append_rows(self._vector_path(model, generation), num_rows, rows)
            places = ((model, name, num_rows + index) for index, name in enumerate(new))
            database.executemany("INSERT INTO vectors VALUES (?, ?, ?)", places)
            total = num_rows + len(new)
            database.execute(
                "INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?)",
                (model, vectors.shape[1], generation, total),
            )

    def vector_file(self, model: str, dimension: int) -> tuple[VectorFile, int]:
        """All published rows, mapped, and their generation."""

        def open_newest() -> tuple[VectorFile, int]:
            with self._lock, _told(self.folder):
                _, generation, num_rows = self._model(model)
            return VectorFile(self._vector_path(model, generation), dimension, num_rows), generation

        return retry(open_newest, StoreError, Backoff(base_s=0.0, attempts=8))

    def vectors(
        self, model: str, dimension: int, hashes: NDArray[np.uint8]
    ) -> dict[bytes, NDArray[np.float32]]:
        """Those vectors that are there, by hash."""
        for _ in range(8):
            places, generation = self.places(model, hashes)
            known = np.flatnonzero(places != NO_ROW)
            if not len(known):
                return {}
            file, mapped = self.vector_file(model, dimension)
            if mapped == generation:
                rows = file.rows(places[known])
                return {hashes[i].tobytes(): row for i, row in zip(known.tolist(), rows, strict=True)}
        raise StoreError("the file of vectors keeps changing", received=model)

    # States

    def load(self, tree: str, model: str) -> TreeState | None:
        """The present state of a tree, its vectors' places brought up to date; None if there is none."""
        for _ in range(8):
            with self._lock, _told(self.folder):
                row = self._database.execute(
                    "SELECT folder FROM states WHERE tree = ? AND model = ?", (tree, model)
                ).fetchone()
            if row is None:
                return None
            try:
                state = load_state(self.folder / "states" / row[0])
            except StoreError:
                if (self.folder / "states" / row[0]).exists():
                    raise
                continue  # Another process published a newer one in between.
            return self.located(model, state)
        raise StoreError("the state of a tree keeps vanishing", field="tree", received=tree)

    def publish(self, tree: str, model: str, state: TreeState) -> None:
        """Makes `state` the present one of a tree, durably. The one before stays on disk until the next.

        Raises `RecordsGoneError` if records that it names are gone.
        """
        name = uuid.uuid4().hex
        with self._writing() as database:
            keys = {row.tobytes() for row in state.records}
            if sum(1 for _ in self._select("SELECT key FROM records WHERE key", list(keys))) < len(keys):
                raise RecordsGoneError(
                    "records were pruned during a build", field="tree", received=tree, fix="update again"
                )
            # Whoever writes is alone, so what nobody names was left by a writer that died, or is out of date.
            self._remove_states({folder for (folder,) in database.execute("SELECT folder FROM states")})
            save_state(state, self.folder / "states" / name)
            database.execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", (tree, model, name))

    def forget(self, tree: str) -> None:
        """Drops the states of a tree. Its records and vectors stay until `prune`."""
        with self._writing() as database:
            database.execute("DELETE FROM states WHERE tree = ?", (tree,))

    def prune(self) -> None:
        """Drops records and vectors that no tree's state names: what edits and forgotten trees left.

        Do it now and then while nothing is built: what a build in progress has embedded would be dropped too,
        and embedded again by the next one.
        """
        with self._writing() as database:
            states = [
                load_state(self.folder / "states" / f)
                for (f,) in database.execute("SELECT folder FROM states")
            ]
            records = {row.tobytes() for state in states for row in state.records}
            hashes = {row.tobytes() for state in states for row in state.hashes}
            dead = [(key,) for (key,) in database.execute("SELECT key FROM records") if key not in records]
            database.executemany("DELETE FROM records WHERE key = ?", dead)
            for (model,) in database.execute("SELECT model FROM models").fetchall():
                self._rewrite(database, model, hashes)
        self._remove_generations()

    def _rewrite(self, database: sqlite3.Connection, model: str, live: set[bytes]) -> None:
        """Copies the live rows of a model into a file of the next generation."""
        dimension, generation, num_rows = self._model(model)
        found = database.execute("SELECT hash, place FROM vectors WHERE model = ? ORDER BY place", (model,))
        kept = [(name, place) for name, place in found if name in live]
        if len(kept) == num_rows:
            return
        kind = row_type(dimension)
        old = np.fromfile(self._vector_path(model, generation), kind, num_rows)
        target = self._vector_path(model, generation + 1)
        append_rows(target, 0, old[[place for _, place in kept]])
        database.execute("DELETE FROM vectors WHERE model = ?", (model,))
        places = [(model, name, index) for index, (name, _) in enumerate(kept)]
        database.executemany("INSERT INTO vectors VALUES (?, ?, ?)", places)
        database.execute(
            "UPDATE models SET generation = ?, num_rows = ? WHERE model = ?",
            (generation + 1, len(kept), model),
        )

    def _remove_generations(self) -> None:
        with self._lock, _told(self.folder):
            models = self._database.execute("SELECT model, generation FROM models").fetchall()
        live = {self._vector_path(model, generation) for model, generation in models}
        for path in self.folder.glob("vectors-*.i8"):
            if path not in live:
                path.unlink(missing_ok=True)

    def _remove_states(self, named: set[str]) -> None:
        for path in (self.folder / "states").iterdir():
            if path.name not in named:
                shutil.rmtree(path, ignore_errors=True)

    def _vector_path(self, model: str, generation: int) -> Path:
        name = blake3(model.encode()).hexdigest(length=8)
        return self.folder / f"vectors-{name}-{generation}.i8"

    def _model(self, model: str) -> tuple[int, int, int]:
        """(dimension, generation, rows), zeros for a new model."""
        row = self._database.execute(
            "SELECT dimension, generation, num_rows FROM models WHERE model = ?", (model,)
        ).fetchone()
        return row or (0, 0, 0)

    def _find(self, statement: str, keys: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
        with self._lock, _told(self.folder):
            return list(self._select(statement, list(keys)))

    def _select(self, statement: str, keys: Sequence[bytes], *before: str) -> Iterator[tuple[bytes, bytes]]:
        for start in range(0, len(keys), _AT_ONCE):
            part = keys[start : start + _AT_ONCE]
            marks = ",".join("?" * len(part))
            yield from self._database.execute(f"{statement} IN ({marks})", (*before, *part))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that excludes all other writers."""
        with self._lock, _told(self.folder):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(
            f"the code index cannot be read or written: {error}",
            received=str(folder),
            fix="delete it: it is rebuilt",
        ) from error
