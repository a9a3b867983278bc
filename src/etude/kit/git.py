"""Asks this machine's git about a repository: nothing is fetched, and nothing that it configures is run.

Files that git left as pointers are recognised.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import IO

_SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_SAID_CHARS = 300
_LFS = b"version https://git-lfs"


def run_git(
    root: Path,
    *words: str,
    stdin: bytes = b"",
    timeout_s: float = 60.0,
    out: IO[bytes] | None = None,
    alone: bool = False,
) -> bytes:
    """What git prints, in `root`; nothing if it is written to the file `out`.

    `alone`: a repository above `root` is none of its business. Raises OSError where there is no git,
    subprocess.CalledProcessError for another exit status than 0, TimeoutExpired after `timeout_s`.
    """
    ceiling = {"GIT_CEILING_DIRECTORIES": str(root.resolve().parent)} if alone else {}
    ran = subprocess.run(
        ["git", *_SAFE, *words],
        cwd=root,
        env={**os.environ, "GIT_NO_LAZY_FETCH": "1", **ceiling},
        input=stdin,
        stdout=subprocess.PIPE if out is None else out,
        stderr=subprocess.PIPE,
        timeout=timeout_s,
        check=True,
    )
    return ran.stdout or b""


def git_fault(error: OSError | subprocess.SubprocessError) -> str:
    """Why `run_git` failed: git's own words, if it said any."""
    said: bytes = getattr(error, "stderr", None) or b""
    return said.decode(errors="replace").strip()[:_SAID_CHARS] or str(error)


def lfs_fix(path: Path) -> str:
    """What to do about a file that is a pointer of Git LFS; empty for any other."""
    with path.open("rb") as file:
        is_pointer = file.read(len(_LFS)) == _LFS
    return "it is a pointer of Git LFS: run `git lfs pull` where it was cloned" if is_pointer else ""
