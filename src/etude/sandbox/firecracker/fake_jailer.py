"""The jailer of the fake: checks its arguments as the real one does, makes the directory, and starts
the program there. It keeps its user and its root: the fake needs the host's Python.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path


def main(arguments: list[str]) -> None:
    """As the real program; never returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--id", required=True)
    parser.add_argument("--exec-file", required=True, type=Path)
    parser.add_argument("--uid", required=True, type=int)
    parser.add_argument("--gid", required=True, type=int)
    parser.add_argument("--chroot-base-dir", default="/srv/jailer", type=Path)
    parser.add_argument("--cgroup-version", default="1", choices=("1", "2"))
    parser.add_argument("--parent-cgroup")
    parser.add_argument("--cgroup", action="append", default=[])
    parser.add_argument("--netns")
    parser.add_argument("--new-pid-ns", action="store_true")
    parser.add_argument("--daemonize", action="store_true")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", options.id):
        raise SystemExit(f"Invalid instance ID: {options.id}")
    if "firecracker" not in options.exec_file.name:
        raise SystemExit(f"Invalid filename. The filename of `--exec-file` must contain {'firecracker'!r}")
    if not options.exec_file.is_file():
        raise SystemExit(f"Failed to canonicalize path {options.exec_file}: No such file or directory")
    for row in options.cgroup:
        if not re.fullmatch(r"[\w.]+=.+", row):
            raise SystemExit(f"Invalid format for cgroups: {row}")
    root = options.chroot_base_dir / options.exec_file.name / options.id / "root"
    root.mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    argv = [str(options.exec_file), "--id", options.id, *arguments[split + 1 :]]
    os.execv(argv[0], argv)
