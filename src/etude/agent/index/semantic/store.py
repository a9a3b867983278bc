"""The database of semantic search: one SQLite file for many trees.

    trees                      directories that are indexed
    files   (tree, path)       status and digest of a file when it was read
    chunks  (file)             its functions and classes: lines, text, name of the vector
    words_N, terms_N           full text of tree N's chunks: BM25 by FTS5, and how many chunks hold a word
    vectors (model, name)      by content: a second tree with the same functions reuses them

Each batch of a build is one transaction, so a build that is killed loses the current batch at most. Any
number of processes may read and write (write-ahead log).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.agent.index.semantic.chunks import CHUNKER_VERSION, Chunk, chunk_file, chunker_key
from etude.agent.index.semantic.embedding import EMBEDDING_TEXT_VERSION, embedding_text
from etude.agent.index.semantic.words import stems
from etude.errors import ResourceError, StoreError
from etude.kit.locks import locked

STORE_VERSION = 2
STORED = np.dtype("<f2")
"""Element type of a stored vector."""
_BUSY_TIMEOUT_S = 60.0
_AT_ONCE = 500
"""Keys of one SQL statement."""
_FULL_TEXT = "fts5"
_SCHEMA = """
CREATE TABLE trees (id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, scanned INTEGER NOT NULL DEFAULT 0,
    revision INTEGER NOT NULL DEFAULT 0);
CREATE TABLE files (id INTEGER PRIMARY KEY, tree INTEGER NOT NULL, path BLOB NOT NULL,
    size_bytes INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
    inode INTEGER NOT NULL, digest BLOB NOT NULL,
    cut TEXT NOT NULL, UNIQUE (tree, path));
CREATE TABLE chunks (id INTEGER PRIMARY KEY, file INTEGER NOT NULL, first_line INTEGER NOT NULL,
    last_line INTEGER NOT NULL, symbol TEXT NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL,
    num_words INTEGER NOT NULL);
CREATE INDEX chunks_of_files ON chunks (file);
CREATE TABLE vectors (model TEXT NOT NULL, name BLOB NOT NULL, numbers BLOB NOT NULL,
    PRIMARY KEY (model, name)) WITHOUT ROWID;
"""


class FileStat(NamedTuple):
    """Cheap evidence that a file is unchanged since it was read: git's rule."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStat:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of a tree as it was when it was read."""

    path: str
    stat: FileStat
    digest: bytes
    """BLAKE3 of its content."""
    cut: str
    """How it was cut, see `cut_key`."""


@dataclass(frozen=True, slots=True)
class CutChunk:
    """A chunk with its search keys: the name of its vector, and its stems."""

    chunk: Chunk
    vector: bytes
    """Names its vector: a hash of what is embedded."""
    symbol_stems: list[str]
    text_stems: list[str]
    path_stems: list[str]

    @property
    def num_words(self) -> int:
        return len(self.symbol_stems) + len(self.text_stems) + len(self.path_stems)


def cut_key(path: str) -> str:
    """Identifies everything but a file's bytes that decides its chunks and vectors."""
    return f"{EMBEDDING_TEXT_VERSION}/{CHUNKER_VERSION}/{chunker_key(path)}"


def cut_file(path: str, content: bytes) -> list[CutChunk]:
    """The chunks of a file, with their words: a millisecond or two for an ordinary one."""
    path_stems = stems(path.rpartition(".")[0] or path)
    return [
        CutChunk(
            chunk,
            blake3(embedding_text(chunk.symbol, chunk.text).encode("utf-8", "surrogatepass")).digest(
                length=16
            ),
            stems(chunk.symbol),
            stems(chunk.text),
            path_stems,
        )
        for chunk in chunk_file(path, content)
    ]


class SemanticStore:
    """The database in a folder, created if missing. Its methods block; several threads may call them.

    Raises StoreError if it is of another version, damaged or busy for a minute; ResourceError where SQLite
    has no FTS5.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._database = sqlite3.connect(
                folder / "index.sqlite", _BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                with locked(folder):  # SQLite does not wait for a process that changes the journal mode
                    self._prepare()
            except BaseException:
                self._database.close()
                raise

    def _prepare(self) -> None:
        if not self._select_int("SELECT count(*) FROM pragma_module_list WHERE name = ?", _FULL_TEXT):
            raise ResourceError(
                "SQLite lacks full-text search (FTS5)",
                field="sqlite3",
                received=sqlite3.sqlite_version,
                fix="use a Python whose SQLite was built with FTS5",
            )
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        with self._writing() as database:
            version = self._select_int("PRAGMA user_version")
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {STORE_VERSION}")
            elif version != STORE_VERSION:
                raise StoreError(
                    "the code index was written by another version",
                    field="index",
                    received=version,
                    fix=f"delete {self.folder}",
                )

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._database.close()

    def tree(self, key: str) -> int:
        """Number of the tree with this key, created empty if there is none."""
        with self._writing() as database:
            number = self._select_int("SELECT id FROM trees WHERE key = ?", key)
            if not number:
                number = database.execute("INSERT INTO trees (key) VALUES (?)", (key,)).lastrowid
                assert number is not None
                columns = "symbol, text, path, tokenize = 'ascii'"
                database.execute(f"CREATE VIRTUAL TABLE words_{number} USING {_FULL_TEXT}({columns})")
                database.execute(f"CREATE VIRTUAL TABLE terms_{number} USING fts5vocab(words_{number}, row)")
        return number

    def drop(self, tree: int) -> None:
        """Deletes a tree, but not its vectors, which others may share. Its number is invalid afterwards."""
        with self._writing() as database:
            of_files = "DELETE FROM chunks WHERE file IN (SELECT id FROM files WHERE tree = ?)"
            of_tree = "DELETE FROM files WHERE tree = ?", "DELETE FROM trees WHERE id = ?"
            for statement in (of_files, *of_tree):
                database.execute(statement, (tree,))
            for table in (f"terms_{tree}", f"words_{tree}"):
                database.execute(f"DROP TABLE {table}")

    def files(self, tree: int) -> dict[str, FileRow]:
        """The stored records of a tree's files, by path."""
        columns = "path, size_bytes, mtime_ns, ctime_ns, inode, digest, cut"
        with self.reading() as database:
            rows = database.execute(f"SELECT {columns} FROM files WHERE tree = ?", (tree,)).fetchall()
        found = (FileRow(os.fsdecode(row[0]), FileStat(*row[1:5]), row[5], row[6]) for row in rows)
        return {file.path: file for file in found}

    def replace(
        self, tree: int, gone: Iterable[str], files: Iterable[tuple[FileRow, list[CutChunk] | None]] = ()
    ) -> None:
        """Removes files and replaces the entries of others, in one transaction.

        Without chunks only a file's record is replaced.
        """
        with self._writing() as database:
            for path in gone:
                self._remove(database, tree, path)
            for file, chunks in files:
                if chunks is not None:
                    self._remove(database, tree, file.path)
                row = (*file.stat, file.digest, file.cut, tree, os.fsencode(file.path))
                if chunks is None:
                    database.execute(
                        "UPDATE files SET size_bytes = ?, mtime_ns = ?, ctime_ns = ?, inode = ?, digest = ?,"
                        " cut = ? WHERE tree = ? AND path = ?",
                        row,
                    )
                else:
                    self._insert(database, tree, row, chunks)
            self._bump_revision(database, tree)

    def _remove(self, database: sqlite3.Connection, tree: int, path: str) -> None:
        file = self._select_int("SELECT id FROM files WHERE tree = ? AND path = ?", tree, os.fsencode(path))
        words = f"DELETE FROM words_{tree} WHERE rowid IN (SELECT id FROM chunks WHERE file = ?)"
        for statement in (words, "DELETE FROM chunks WHERE file = ?", "DELETE FROM files WHERE id = ?"):
            database.execute(statement, (file,))

    def _insert(
        self, database: sqlite3.Connection, tree: int, row: tuple[object, ...], chunks: Sequence[CutChunk]
    ) -> None:
        columns = "size_bytes, mtime_ns, ctime_ns, inode, digest, cut, tree, path"
        file = database.execute(
            f"INSERT INTO files ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row
        ).lastrowid
        for cut in chunks:
            chunk = cut.chunk
            place = (file, chunk.first_line, chunk.last_line)
            values = (*place, chunk.symbol, chunk.text, cut.vector, cut.num_words)
            number = database.execute(
                "INSERT INTO chunks VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", values
            ).lastrowid
            words = (" ".join(part) for part in (cut.symbol_stems, cut.text_stems, cut.path_stems))
            database.execute(
                f"INSERT INTO words_{tree} (rowid, symbol, text, path) VALUES (?, ?, ?, ?)", (number, *words)
            )

    def finish(self, tree: int) -> None:
        """Records that all files of the tree are in the store, embedded or not."""
        with self._writing() as database:
            database.execute("UPDATE trees SET scanned = 1 WHERE id = ?", (tree,))
            self._bump_revision(database, tree)

    def unembedded(self, tree: int, model: str) -> list[int]:
        """Numbers of the chunks that have no vector of this model yet."""
        with self.reading() as database:
            rows = database.execute(
                "SELECT c.id FROM chunks c JOIN files f ON f.id = c.file WHERE f.tree = ? AND NOT EXISTS"
                " (SELECT 1 FROM vectors v WHERE v.model = ? AND v.name = c.vector)",
                (tree, model),
            )
            return [number for (number,) in rows]

    def embedding_texts(self, chunks: Sequence[int]) -> dict[bytes, str]:
        """The texts of these chunks to embed, by name of the vector."""
        rows = self.select("SELECT vector, symbol, text FROM chunks WHERE id", chunks)
        return {name: embedding_text(symbol, text) for name, symbol, text in rows}

    def vectors(self, model: str, names: Sequence[bytes]) -> dict[bytes, NDArray[np.float32]]:
        """The stored vectors among `names`, by name."""
        rows = self.select("SELECT name, numbers FROM vectors WHERE model = ? AND name", names, model)
        return {name: np.frombuffer(numbers, STORED).astype(np.float32) for name, numbers in rows}

    def add_vectors(self, tree: int, model: str, vectors: dict[bytes, NDArray[np.float32]]) -> None:
        """Stores vectors; existing ones stay. Searches of the tree reload their view."""
        rows = [(model, name, numbers.astype(STORED).tobytes()) for name, numbers in vectors.items()]
        with self._writing() as database:
            database.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?, ?)", rows)
            self._bump_revision(database, tree)

    def select(self, statement: str, keys: Sequence[object], *before: object) -> list[tuple]:
        """Rows of a statement whose last column is one of `keys`."""
        rows: list[tuple] = []
        with self.reading() as database:
            for start in range(0, len(keys), _AT_ONCE):
                part = keys[start : start + _AT_ONCE]
                marks = ",".join("?" * len(part))
                rows += database.execute(f"{statement} IN ({marks})", (*before, *part))
        return rows

    @contextlib.contextmanager
    def reading(self, begin: str = "BEGIN") -> Iterator[sqlite3.Connection]:
        """A transaction: all reads in it see one snapshot. A nested one is part of the outer one."""
        with self._lock, self._errors():
            if self._database.in_transaction:
                yield self._database
                return
            self._database.execute(begin)
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _writing(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """A transaction that excludes all other writers, committed whole or not at all."""
        return self.reading("BEGIN IMMEDIATE")

    def _bump_revision(self, database: sqlite3.Connection, tree: int) -> None:
        database.execute("UPDATE trees SET revision = revision + 1 WHERE id = ?", (tree,))

    def _select_int(self, statement: str, *values: object) -> int:
        row = self._database.execute(statement, values).fetchone()
        return row[0] if row else 0

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Converts SQLite's errors to StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"the code index cannot be read or written: {error}",
                field="index",
                received=str(self.folder),
                fix="delete it: it is rebuilt",
            ) from error
