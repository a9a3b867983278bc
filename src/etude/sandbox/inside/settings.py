"""What the server must know of its sandbox, and what every program in it is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.socket_memory import SocketMemory


@dataclass(frozen=True)
class Settings:
    """What the server must know of its sandbox."""

    memory_bytes: int
    cpu_s: int
    path: str
    """PATH of commands."""
    env: dict[str, str] = field(default_factory=dict)
    """Of the image."""
    open_files: int = 1024
    """Of each process."""
    has_groups: bool = False
    """Whether control groups bound memory: then the watchdog leaves shared memory to them."""
    uid: int | None = None
    """Whom commands run as, where the server itself is root."""
    watch_memory: bool = True
    """Whether the watchdog bounds memory; not needed where the kernel does."""
    sockets: SocketMemory | None = None
    """What counts the buffers of sockets; None where something else bounds them."""
    file_operation_s: float = 2.0
    """Processor time that one file operation may take; a regular expression can ask for any amount."""

    def environment(self, home: str, extra: dict[str, str]) -> dict[str, str]:
        """The environment of a command: ours, the image's over it, the caller's over both."""
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
    """Raises Fault for what no program can be given. `names`: of environment variables."""
    for text in (*texts, *names):
        try:
            text.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            raise Fault("argument", f"no text for a program: {text!r}") from None
        if "\0" in text:
            raise Fault("argument", "a command and its environment have no NUL characters")
    if any("=" in name for name in names):
        raise Fault("argument", "names of environment variables have no `=`")
