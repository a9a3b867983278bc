"""A fake runsc: the same command line, no isolation, an inner program that keeps its files in a dictionary.

`install_fake` writes it as a separate program (standard library only, run by the system's Python, since it is
called in a namespace in which little else is reachable). A `fault` makes one step fail:

    old, other     --version prints an old release, another one
    run, restore   exits at once with a message
    mute           starts and sends nothing
    checkpoint     exits with a message; the container keeps running
    partial        the checkpoint lacks a file
    hang           the checkpoint never ends
    die            the container dies during the checkpoint
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

INTERPRETER = "/usr/bin/python3"
_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")


def install_fake(path: Path, fault: str = "") -> Path:
    """Writes the fake to `path` as an executable."""
    source = Path(__file__).read_text(encoding="utf-8")
    path.write_text(f"#!{INTERPRETER} -IS\n{source}\nmain(sys.argv[1:], {fault!r})\n", encoding="utf-8")
    path.chmod(0o755)
    return path


class Inside:
    """The program inside: answers frames, and writes its state to a file for `checkpoint`."""

    def __init__(self, notes: Path, files: dict[str, str]) -> None:
        self._notes = notes
        self._files = files
        self._write_notes()

    def serve(self, ready: bool) -> None:
        """Answers frames until the end of standard input."""
        if ready:
            self._send({"ready": True})
        while True:
            sizes = sys.stdin.buffer.read(8)
            if len(sizes) < 8:
                return
            head_bytes, payload_bytes = struct.unpack("<II", sizes)
            header = json.loads(sys.stdin.buffer.read(head_bytes))
            answer, data = self._handle(header, sys.stdin.buffer.read(payload_bytes))
            self._send({**answer, "id": header["id"]}, data)

    def _handle(self, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if header["op"] in ("install", "write"):
            start = 0
            for path, size in header["files"]:
                self._files[path] = payload[start : start + size].decode("latin-1")
                start += size
            self._write_notes()
        elif header["op"] == "read":
            if header["path"] not in self._files:
                return {"fault": ["missing", "no such file or directory"]}, b""
            return {}, self._files[header["path"]].encode("latin-1")
        return {}, b""

    def _write_notes(self) -> None:
        self._notes.write_text(json.dumps({"pid": os.getpid(), "files": self._files}), encoding="utf-8")

    def _send(self, header: dict[str, Any], data: bytes = b"") -> None:
        head = json.dumps(header).encode()
        sys.stdout.buffer.write(struct.pack("<II", len(head), len(data)) + head + data)
        sys.stdout.buffer.flush()


def main(arguments: list[str], fault: str) -> None:
    """Implements the parts of runsc's command line that Étude uses."""
    if arguments == ["--version"]:
        print(
            "runsc version release-" + {"old": "20230102.0", "other": "20990202.0"}.get(fault, "20990101.0")
        )
        return
    options: dict[str, str] = {}
    for word in arguments:
        key, _, value = word.removeprefix("--").partition("=")
        options[key] = value
    verb, container = [word for word in arguments if not word.startswith("--")]
    if verb == fault:
        sys.exit(f"{verb}: made to fail")
    notes = Path(options["root"], f"{container}.json")
    image = Path(options.get("image-path", ""))
    if verb == "checkpoint":
        _checkpoint(notes, image, fault)
        return
    files: dict[str, str] = {}
    if verb == "restore":
        files = json.loads((image / "pages.img").read_text(encoding="utf-8"))
    json.loads(Path(options["bundle"], "config.json").read_text(encoding="utf-8"))
    Path(options["pid-file"]).write_text(str(os.getpid()), encoding="ascii")
    if fault == "mute":
        time.sleep(3600)
    Inside(notes, files).serve(ready=verb == "run")


def _checkpoint(notes: Path, image: Path, fault: str) -> None:
    state = json.loads(notes.read_text(encoding="utf-8"))
    if fault == "hang":
        time.sleep(3600)
    if fault == "die":
        os.kill(state["pid"], 9)
        sys.exit("the container died")
    for name in _FILES[1:] if fault == "partial" else _FILES:
        (image / name).write_text(json.dumps(state["files"]), encoding="utf-8")
