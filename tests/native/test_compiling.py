"""Compiling native code: it falls back to any processor only if the compiler does not know this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from etude.errors import ResourceError
from etude.native import compile_library, find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


class Workshop:
    """Sources of one function, a compiler that notes its calls, and where libraries go."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources = directory / "sources"
        self.sources.mkdir()
        (self.sources / "one.c").write_text("int one(void) { return 1; }\n", encoding="utf-8")
        self._calls, self._compiler = directory / "calls", directory / "own-cc"
        self._calls.touch()
        monkeypatch.setenv("CC", str(self._compiler))
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        self.cache = directory / "cache" / "etude"

    def compiler(self, script: str) -> None:
        """What it does once it has noted how it was called."""
        self._compiler.write_text(f'#!/bin/sh\necho "$@" >>{self._calls}\n{script}\n', encoding="utf-8")
        self._compiler.chmod(0o755)

    def compile(self, timeout_s: float = 60.0) -> int:
        """What the compiled function returns."""
        library = compile_library(self.sources, field="engine.kernels", fix="wait", timeout_s=timeout_s)
        return library.one()

    @property
    def calls(self) -> list[str]:
        """How the compiler was called, but for its version."""
        lines = self._calls.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if "--version" not in line]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("script", "timeout_s", "problem"),
    [
        ("exec sleep 600", 0.5, "took more than"),
        ("kill -9 $$", 60, "exit status -9"),
        ("echo 'cc: fatal error: Killed signal terminated program cc1' >&2; exit 1", 60, "Killed"),
        ("echo 'cc1: out of memory allocating 65536 bytes' >&2; exit 1", 60, "out of memory"),
        ("echo 'one.s: No space left on device' >&2; exit 1", 60, "No space left"),
        ("echo 'one.s: Disk quota exceeded' >&2; exit 1", 60, "Disk quota exceeded"),
        ("echo 'cc: vfork: Resource temporarily unavailable' >&2; exit 1", 60, "temporarily unavailable"),
        ('[ "$LC_ALL" = C ] && echo Killed >&2 || echo Abgebrochen >&2; exit 1', 60, "Killed"),
    ],
)
def test_a_compiler_that_lacks_something_is_not_asked_for_code_for_any_processor(
    workshop: Workshop, script: str, timeout_s: float, problem: str
) -> None:
    workshop.compiler(f'[ "$1" = --version ] && exit\n{script}')
    with pytest.raises(ResourceError, match=problem):
        workshop.compile(timeout_s)
    assert workshop.calls or timeout_s < 1, "one that is ended early may not have come to note its call"
    assert all("-march=native" in call for call in workshop.calls)
    assert list(workshop.cache.iterdir()) == []


@needs_compiler
def test_a_compiler_that_does_not_know_this_processor_compiles_for_any(workshop: Workshop) -> None:
    found = find_compiler_without_cc()
    workshop.compiler(
        f'case "$*" in *native*) echo "unknown option -march=native" >&2; exit 1;; esac\nexec {found} "$@"'
    )
    assert workshop.compile() == 1
    assert "native" not in workshop.calls[-1]
    made = list(workshop.cache.iterdir())
    num_calls = len(workshop.calls)
    assert workshop.compile() == 1, "loaded, not compiled again"
    assert list(workshop.cache.iterdir()) == made
    assert len(workshop.calls) == num_calls


@needs_compiler
@pytest.mark.parametrize("left", [b"", b"no library"])
def test_what_a_crash_left_of_a_library_is_compiled_again(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: bytes
) -> None:
    workshop.compiler(f'exec {find_compiler_without_cc()} "$@"')
    workshop.compile()
    (made,) = workshop.cache.iterdir()
    # At another place: this process has the first one loaded.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    (tmp_path / "other" / "etude").mkdir(parents=True)
    (tmp_path / "other" / "etude" / made.name).write_bytes(left)
    assert workshop.compile() == 1


def test_a_compiler_that_cannot_be_run_is_a_resource_that_lacks(workshop: Workshop) -> None:
    workshop.compiler("")
    Path(os.environ["CC"]).write_bytes(b"of another kind of machine")
    with pytest.raises(ResourceError, match="Exec format error"):
        workshop.compile()


def find_compiler_without_cc() -> str:
    """The machine's own compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CC")
        return " ".join(find_compiler() or ())
