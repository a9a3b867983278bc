"""Settings of the server inside a sandbox, and the environment of commands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.socket_memory import SocketMemory


@dataclass(frozen=True)
class Settings:
    """Settings of the server inside a sandbox."""

    memory_bytes: int
    cpu_s: int
    path: str
    """PATH of commands."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the image."""
    open_files: int = 1024
    """Limit of descriptors of each process."""
    has_groups: bool = False
    """Whether control groups bound memory; then the watchdog ignores shared memory."""
    uid: int | None = None
    """User of commands, if the server itself is root; None: that of the server."""
    watch_memory: bool = True
    """Whether the watchdog bounds memory; not needed if the kernel does."""
    sockets: SocketMemory | None = None
    """Counter of socket buffers; None if something else bounds them."""
    file_operation_s: float = 2.0
    """Limit of processor time of one file operation; regular expressions can take any amount."""

    def environment(self, home: str, extra: dict[str, str]) -> dict[str, str]:
        """The environment of a command: defaults, overridden by the image's, then by `extra`."""
        return {
            "PATH": self.path,
            "HOME": home,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            **self.env,
            **extra,
        }


def check_texts(texts: Iterable[str], names: Iterable[str]) -> None:
    """Raises Fault for invalid arguments or environment. `names`: of environment variables."""
    for text in (*texts, *names):
        try:
            text.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            raise Fault("argument", f"no text for a program: {text!r}") from None
        if "\0" in text:
            raise Fault("argument", "a command and its environment have no NUL characters")
    if any("=" in name for name in names):
        raise Fault("argument", "names of environment variables have no `=`")
