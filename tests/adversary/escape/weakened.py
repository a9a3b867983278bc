"""Backends with single protections taken away, on the fork server's side and on the owner's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import etude.sandbox.calls as calls_module
import etude.sandbox.files as files_module
import etude.sandbox.snapshots as snapshots_module
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.cgroups import ControlGroups

_ROOT = Path(__file__).resolve().parents[3]
_LAUNCHER = """#!{interpreter} -ISB
import sys
# The arguments are those of an interpreter: -I -S -B -c PROGRAM SOURCE ...
position = sys.argv.index("-c")
sys.path[:0] = [sys.argv[position + 2], {root!r}]
from tests.adversary.escape.weakening import main
main(sys.argv[position + 3:], {weakenings!r})
"""


class WeakenedBackend(LocalBackend):
    """A `LocalBackend` whose fork server lacks the named protections."""

    def __init__(self, state: Path, lifts: frozenset[str]) -> None:
        super().__init__(state)
        self._lifts = lifts
        self._state_directory = state

    def _interpreter(self) -> str:
        interpreter = super()._interpreter()
        ours = sorted(name for name in self._lifts if not is_owners(name))
        launcher = self._state_directory / "weakened-launcher"
        text = _LAUNCHER.format(interpreter=interpreter, root=str(_ROOT), weakenings=ours)
        launcher.write_text(text)
        launcher.chmod(0o755)
        return str(launcher)

    def _open_groups(self) -> ControlGroups | None:
        return None if "control groups" in self._lifts else super()._open_groups()


def is_owners(name: str) -> bool:
    """Whether a weakening is the owner's side's to make."""
    return name == "control groups" or name in OWNERS


@contextmanager
def owner_without(lifts: frozenset[str]) -> Iterator[None]:
    """In the block the owner's own code lacks the named protections."""
    with ExitStack() as stack:
        for name in lifts & set(OWNERS):
            module, attribute, value = OWNERS[name]
            stack.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, value)
        yield


class _Anything:
    """A pattern that every name matches."""

    def fullmatch(self, name: str) -> bool:
        return True


def _join(target: Path, name: str) -> Path:
    return target / name


OWNERS: dict[str, tuple[Any, str, Any]] = {
    "names of downloads checked": (files_module, "below", _join),
    "size of downloads bounded": (files_module, "DOWNLOAD_BYTES", 1 << 60),
    "paths normalised": (calls_module, "normal_path", lambda path, workspace: path),
    "names of snapshots checked": (snapshots_module, "_NAME", _Anything()),
    "digests of snapshots checked": (snapshots_module, "_check_files", lambda directory, manifest: None),
}
"""Weakening -> module, attribute and what it is replaced by."""
