"""Runs git on a repository without fetching, and without programs that the repository configures.

Also recognises files that are Git LFS pointers.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import IO

_SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_STDERR_CHARS = 300
_LFS = b"version https://git-lfs"


def run_git(
    root: Path,
    *words: str,
    stdin: bytes = b"",
    timeout_s: float = 60.0,
    out: IO[bytes] | None = None,
    alone: bool = False,
) -> bytes:
    """Runs git in `root` and returns its output; b"" if that goes to the file `out`.

    `alone`: ignore any repository above `root`. Raises OSError if git is not installed,
    subprocess.CalledProcessError for an exit status other than 0, TimeoutExpired after `timeout_s`.
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
    """Why `run_git` failed: git's error output, if there is any."""
    stderr: bytes = getattr(error, "stderr", None) or b""
    return stderr.decode(errors="replace").strip()[:_STDERR_CHARS] or str(error)


def lfs_fix(path: Path) -> str:
    """How to fix a file that is a Git LFS pointer; empty for any other file."""
    with path.open("rb") as file:
        is_pointer = file.read(len(_LFS)) == _LFS
    return "it is a pointer of Git LFS: run `git lfs pull` in its clone" if is_pointer else ""
