"""Small trees, and ripgrep as the reference for search results."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.agent.index.grep import GrepQuery
from etude.agent.index.grep.ripgrep import Ripgrep, sort_key
from etude.sandbox.types import GrepMatch

CODE = {
    "setup.py": b"from setuptools import setup\nsetup(name='frobnicate')\n",
    "src/main.py": b"import os\n\ndef rename_window(title):\n    return os.path.join(title, 'Kelvin')\n",
    "src/util/text.py": b"class TextError(Exception):\n    pass\n\ndef rename_file(old, new):\n    pass\n",
    "src/util/cr.txt": b"first line\r\nrename_line here\r\n",
    "docs/guide.md": "# Anleitung für rename_window\n\nDie Größe zählt.\n".encode(),
    "docs/wide.txt": "rename_wide ütf\nplain\n".encode("utf-16"),
    "docs/bad.txt": b"rename_bad \xff\xfe\xe9 bytes\nKELVIN \xe2\x84\xaaelvin \xc5\xbfum\n",
    "data/late.dat": b"rename_early line\n" + b"filler line of text\n" * 5000 + b"\0here\nrename_late line\n",
    "data/binary.dat": b"\x7fELF\0\0rename_binary\n",
    "data/empty.txt": b"",
    "data/no_end.txt": b"rename_no_newline",
    "a.b/x.py": b"rename_order = 1\n",
    "a/b/x.py": b"rename_order = 2\n",
    "a/b.py": b"rename_order = 3\nrename_order += 1\n",
    "odd name\n[1].py": b"rename_odd = 1\n",
    "-dash.py": b"rename_dash = 1\n",
    ".hidden/secret.py": b"rename_hidden = 1\n",
    "build/out.py": b"rename_built = 1\n",
    "build/keep.py": b"rename_kept = 1\n",
    "logs/run.log": b"rename_logged\n",
    ".gitignore": b"*.log\n/build/*\n!/build/keep.py\n",
}


def make_tree(root: Path, files: Mapping[str, bytes] = CODE) -> Path:
    """Writes `files` below `root`."""
    root.mkdir(parents=True, exist_ok=True)
    (root / ".git").mkdir(exist_ok=True)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def judged(root: Path, query: GrepQuery) -> list[GrepMatch]:
    """What ripgrep itself finds, read from its JSON: nothing of the code under test takes part."""
    words = [
        "--json",
        "--no-config",
        "--no-ignore",
        *(f"--glob={glob}" for glob in query.globs),
        *query.pattern_flags(),
        "--",
        f"./{query.path}",
    ]
    done = subprocess.run([str(Ripgrep().program), *words], cwd=root, capture_output=True, check=False)
    matches: list[GrepMatch] = []
    for line in done.stdout.splitlines():
        event = json.loads(line)
        if event["type"] == "match":
            data = event["data"]
            path, text = _text(data["path"]).removeprefix("./"), _text(data["lines"])
            matches.append(GrepMatch(path, data["line_number"], text.removesuffix("\n")))
    return sorted(matches, key=lambda match: (sort_key(os.fsencode(match.path)), match.line_number))


def _text(field: dict[str, Any]) -> str:
    raw = base64.b64decode(field["bytes"]) if "bytes" in field else field["text"].encode()
    return raw.decode("utf-8", "surrogateescape")
