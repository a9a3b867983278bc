"""Reads raw documents from files: JSONL, Parquet, Lance, directories of texts."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from numpy.typing import NDArray

from etude.config import SourceConfig
from etude.errors import ConfigError
from etude.errors.packages import missing_package

Raw = str | NDArray[np.int64]
"""A document's text, or its token ids."""

_JSONL = (".jsonl", ".jsonl.zst", ".ndjson")
_ROWS = 1024
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of a source, in a fixed order, and how they are read."""

    name: str
    format: str
    """`jsonl`, `parquet`, `lance` or `files`."""
    paths: tuple[Path, ...]
    column: str

    @property
    def identity(self) -> list[tuple[str, int, int]]:
        """Name, size in bytes and modification time of every file: the key of the source's cache."""
        files = [path for root in self.paths for path in _files_below(root)]
        return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]

    def read(self, skipped: Counter[str]) -> Iterator[Raw]:
        """Yields every document, in order; others are counted in `skipped` by reason: `not UTF-8`, `empty`.

        Raises ConfigError for columns that are missing or hold other data, and for damaged files.
        """
        reader = {"jsonl": _read_jsonl, "parquet": _read_parquet, "lance": _read_lance, "files": _read_text}
        for path in self.paths:
            for raw in reader[self.format](self, path, skipped):
                if not len(raw):
                    skipped["empty"] += 1
                    continue
                yield raw

    def problem(self, message: str, path: Path, received: object, fix: str) -> ConfigError:
        """An error that names the source."""
        return ConfigError(f"{path}: {message}", field=f"source {self.name}", received=received, fix=fix)


def find_files(name: str, config: SourceConfig) -> SourceFiles:
    """Finds the files of a source. Raises ConfigError if there are none of the format."""
    root = Path(config.path)
    if not root.exists():
        raise ConfigError(
            "no such file or directory",
            field=f"source {name}",
            received=config.path,
            fix="name an existing file or directory",
        )
    kind = config.format if config.format != "auto" else _guess_format(root)
    if kind == "lance" or not root.is_dir():
        paths = [root]
    elif kind == "files":
        paths = _matching(name, root, config.pattern)
    else:
        endings = _JSONL if kind == "jsonl" else (".parquet",)
        paths = [path for path in root.rglob("*") if path.name.endswith(endings)]
    if not paths:
        raise ConfigError(
            "has no documents",
            field=f"source {name}",
            received=f"{config.path}, {config.pattern}" if kind == "files" else config.path,
            fix="name another path, format or pattern",
        )
    return SourceFiles(name, kind, tuple(sorted(paths)), config.column)


def _matching(name: str, root: Path, pattern: str) -> list[Path]:
    try:
        return [path for path in root.glob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:  # an empty pattern, one that begins with /
        raise ConfigError(
            f"the pattern is not valid: {error}",
            field=f"source {name}",
            received=pattern,
            fix="name a pattern below the path, such as **/*.py",
        ) from error


def _guess_format(root: Path) -> str:
    if root.name.endswith(".lance"):
        return "lance"
    if root.is_file():
        if root.name.endswith(_JSONL):
            return "jsonl"
        return "parquet" if root.name.endswith(".parquet") else "files"
    files = [path for path in root.rglob("*") if path.is_file()]
    for kind, endings in (("jsonl", _JSONL), ("parquet", (".parquet",))):
        if files and all(path.name.endswith(endings) for path in files):
            return kind
    return "files"


def _files_below(path: Path) -> list[Path]:
    return sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]


def _read_text(source: SourceFiles, path: Path, skipped: Counter[str]) -> Iterator[str]:
    try:
        yield path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        skipped["not UTF-8"] += 1


def _read_jsonl(source: SourceFiles, path: Path, skipped: Counter[str]) -> Iterator[Raw]:
    with path.open("rb") as file:
        lines = _decompressed_lines(source, path, file) if path.suffix == ".zst" else file
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
                continue
            except (ValueError, RecursionError) as error:
                raise source.problem(
                    f"line {number} is not JSON: {error}", path, line[:80], "correct or remove the line"
                ) from None
            if not isinstance(row, Mapping) or source.column not in row:
                known = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
                raise source.problem(
                    f"line {number} has no {source.column!r}", path, known, "set column to the document's key"
                )
            yield _document(source, path, row[source.column], skipped)


def _decompressed_lines(source: SourceFiles, path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Lines of a Zstandard file, of one frame or several. zstandard's own reader does not report truncated
    files."""
    rest, decoder = b"", None
    try:
        while chunk := file.read(_CHUNK_BYTES):
            while chunk:
                decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
                *lines, rest = (rest + decoder.decompress(chunk)).split(b"\n")
                yield from lines
                chunk, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    except zstandard.ZstdError as error:
        raise source.problem(f"is damaged: {error}", path, None, "compress the file again") from error
    if decoder is not None:
        raise source.problem("is truncated", path, path.stat().st_size, "compress the file again")
    yield rest


def _read_parquet(source: SourceFiles, path: Path, skipped: Counter[str]) -> Iterator[Raw]:
    parquet = importlib.import_module("pyarrow.parquet")
    arrow = importlib.import_module("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(source, path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_ROWS, columns=[source.column]):
                for value in batch.column(0).to_pylist():
                    yield _document(source, path, value, skipped)
    except (arrow.ArrowException, OSError) as error:
        raise source.problem(f"is not Parquet: {error}", path, None, "write the file again") from error


def _read_lance(source: SourceFiles, path: Path, skipped: Counter[str]) -> Iterator[Raw]:
    try:
        lance = importlib.import_module("lance")
    except ImportError as error:
        raise missing_package(
            f"the Lance data set {path}",
            "pylance",
            field=f"source {source.name}",
            instead=", or export the data set as Parquet",
        ) from error
    try:
        dataset = lance.dataset(str(path))
        _check_column(source, path, dataset.schema.names)
        for batch in dataset.to_batches(columns=[source.column], batch_size=_ROWS):
            for value in batch.column(0).to_pylist():
                yield _document(source, path, value, skipped)
    except (ValueError, OSError) as error:  # what pylance raises for files that are missing or damaged
        raise source.problem(f"is not a Lance data set: {error}", path, None, "write it again") from error


def _check_column(source: SourceFiles, path: Path, names: Sequence[str]) -> None:
    if source.column not in names:
        raise source.problem(
            f"has no column {source.column!r}", path, ", ".join(names), "set column to the documents' column"
        )


def _document(source: SourceFiles, path: Path, value: Any, skipped: Counter[str]) -> Raw:
    """A text or token ids; empty for a null."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            skipped["not UTF-8"] += 1
            return ""
    if isinstance(value, list) and not value:
        return ""
    try:
        tokens = np.asarray(value if isinstance(value, list) else 0)
    except ValueError:  # lists of unequal length
        tokens = np.asarray(0)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise source.problem(
            f"{source.column!r} holds neither texts nor lists of token ids",
            path,
            type(value).__name__,
            "set column to the documents' column",
        )
    return tokens.astype(np.int64)
