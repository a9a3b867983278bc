"""Claim: the fast test suite detects mistakes: `make test` catches nearly all defects in defects.toml.

    python benchmarks/defects.py [--json FILE] [--name NAME]... [--whole]

Each defect is put, alone, into a copy of this checkout, and the tests most likely to catch it are run there,
without slow ones and on a PATH without the programs that `make test` does not need. With `--whole` the whole
fast suite follows if those pass: minutes each. In the end all tests that caught a defect run on the copy
without defects: one that fails there as well has caught nothing. Exit code 1 if a smaller share than
`LEAST_SHARE` is caught.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from etude.observe import commit, describe_machine, versions

LEAST_SHARE = 25 / 30
TIMEOUT_S = 300.0
"""Time limit for each of a defect's `tests`."""
WHOLE_TIMEOUT_S = 3600.0
HIDDEN = (
    *(
        "cc",
        "c99",
        "gcc*",
        "*-gcc*",
        "clang*",
        "qemu-*",
        "runsc",
        "runc",
        "crun",
        "podman",
        "buildah",
        "docker*",
    ),
    *("bwrap", "rg", "node", "nodejs", "npm", "npx", "mmdebstrap"),
)
"""Programs that `make test` does not need."""

_CHECKOUT = Path(__file__).resolve().parents[1]
_LIST = Path(__file__).with_suffix(".toml")
_SOURCES = "src/etude"
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "runs", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info"
)
_GRACE_S = 10.0
_FAST = ("-m", "not slow")
_PASSED, _NOTHING_CHOSEN = 0, 5


@dataclass(frozen=True, slots=True)
class Defect:
    """One planted mistake: a text replacement in a source file. See defects.toml."""

    name: str
    file: str
    old: str
    new: str
    harm: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether and by which test a defect was caught."""

    name: str
    file: str
    harm: str
    caught: bool
    by: str
    """The test that failed; empty if none did."""
    seconds: float


def read_defects(path: Path = _LIST) -> list[Defect]:
    """Reads the list. Raises TypeError for unknown or missing fields, ValueError unless `old` occurs once."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["defect"]
    defects = [Defect(**{**row, "tests": tuple(f"tests/{place}" for place in row["tests"])}) for row in rows]
    for defect in defects:
        count = (_CHECKOUT / _SOURCES / defect.file).read_text(encoding="utf-8").count(defect.old)
        if count != 1:
            raise ValueError(f"{defect.name}: old text occurs {count} times in {defect.file}, not once")
    return defects


class Copy:
    """A copy of the checkout in which defects are planted and tests run."""

    def __init__(self, directory: Path, path: str) -> None:
        """`path`: PATH of its tests."""
        self._path = path
        self.directory = directory / "checkout"
        shutil.copytree(_CHECKOUT, self.directory, ignore=_LEFT_OUT, symlinks=True)
        directory.chmod(0o755)  # some tests run as plain users
        (self.directory / ".venv").symlink_to(_CHECKOUT / ".venv")

    @contextlib.contextmanager
    def planted(self, defect: Defect) -> Iterator[None]:
        """Plants the defect for the duration of the block."""
        path = self.directory / _SOURCES / defect.file
        text, status = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(text.replace(defect.old, defect.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(
                path, ns=(status.st_atime_ns, status.st_mtime_ns)
            )  # what was compiled meanwhile is older

    def failures(self, arguments: Sequence[str], timeout_s: float) -> list[str]:
        """The tests that fail; empty after a timeout, since a busy machine may be the reason.

        Raises RuntimeError if pytest fails.
        """
        cache = self.directory / ".pytest_cache"
        shutil.rmtree(cache, ignore_errors=True)
        process = subprocess.Popen(
            [".venv/bin/pytest", "-q", *arguments],
            cwd=self.directory,
            env={**os.environ, "PATH": self._path, "PYTHONPATH": str(self.directory / "src")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            print(f"no end within {timeout_s:g} s: {' '.join(arguments)}", file=sys.stderr, flush=True)
            return []
        finally:
            _end(process)
        if process.returncode in (_PASSED, _NOTHING_CHOSEN):
            return []
        with contextlib.suppress(FileNotFoundError):
            return [*json.loads((cache / "v/cache/lastfailed").read_text(encoding="utf-8"))]
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-4000:]}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ends pytest, if it still runs, with its whole process group."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE_S)
            return


@contextlib.contextmanager
def hidden_programs() -> Iterator[str]:
    """A PATH without the programs of `HIDDEN`, valid within the block."""
    keep = ["sh", "-c", 'echo "$PATH"; read -r _']
    with subprocess.Popen(
        [_CHECKOUT / ".ci/without", *HIDDEN, "--", *keep],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def find_failing_test(copy: Copy, defect: Defect, *, whole: bool) -> Finding:
    """Runs tests until one fails with the defect. `whole`: at last the whole fast suite."""
    began = time.monotonic()
    selections = [((place, *_FAST), TIMEOUT_S) for place in defect.tests]
    if whole:
        workers = str(min(4, os.cpu_count() or 1))
        together = ("-n", workers, "--dist", "loadfile", "-m", "not slow and not alone")
        selections += [(together, WHOLE_TIMEOUT_S), (("-m", "alone and not slow"), WHOLE_TIMEOUT_S)]
    by = ""
    with copy.planted(defect):
        for arguments, timeout_s in selections:
            if failed := copy.failures(("-x", *arguments), timeout_s):
                by = failed[0]
                break
    return Finding(defect.name, defect.file, defect.harm, bool(by), by, round(time.monotonic() - began, 1))


def without_false(copy: Copy, findings: Sequence[Finding]) -> list[Finding]:
    """The findings; defects whose test also fails on a copy without defects count as not caught."""
    named = sorted({found.by for found in findings if found.caught})
    failed = copy.failures((*named, *_FAST), WHOLE_TIMEOUT_S) if named else []
    return [
        replace(finding, caught=False, by="") if finding.by in failed else finding for finding in findings
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--name", action="append", default=[], help="this defect only; may be repeated")
    parser.add_argument("--whole", action="store_true", help="the whole fast suite for those that survive")
    options = parser.parse_args()
    defects = [defect for defect in read_defects() if not options.name or defect.name in options.name]
    if not defects:
        parser.error(f"no such defect; there are: {', '.join(defect.name for defect in read_defects())}")
    began_at = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="defects-") as directory, hidden_programs() as path:
        copy = Copy(Path(directory), path)
        for defect in defects:
            found = find_failing_test(copy, defect, whole=options.whole)
            findings.append(found)
            print(
                f"{found.name:46s} {found.seconds:6.0f} s  {found.by or 'SURVIVES: ' + found.harm}",
                flush=True,
            )
        findings = without_false(copy, findings)
    caught = sum(found.caught for found in findings)
    print(f"\n{caught} of {len(findings)} caught")
    if options.json is not None:
        result = {
            "figures": {"seeded": len(findings), "caught": caught},
            "defects": [asdict(found) for found in findings],
            "machine": describe_machine(),
            "versions": versions(),
            "commit": commit(),
            "time": began_at,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if caught >= LEAST_SHARE * len(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
