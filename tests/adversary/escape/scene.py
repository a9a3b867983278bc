"""The host's side of an attempt: canaries that no sandbox may read, change or reach.

After each attempt all of them are looked at from outside: what a program claims counts only beside that.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from etude.kit.ports import free_port

NOBODY = 65534
"""Whose processes an owner that is root has on the host."""
_VICTIM = """
import os, signal
def note(number, frame):
    os.write(1, b"signal %d\\n" % number)
for number in (signal.SIGUSR1, signal.SIGIO, signal.SIGTERM):
    signal.signal(number, note)
os.write(1, b"ready\\n")
while os.read(0, 1):
    os.write(1, b"awake\\n")
"""
_SYSCTLS = ("kernel/core_pattern", "kernel/hostname", "kernel/modprobe", "vm/overcommit_memory")
VARIABLE = "ETUDE_CANARY"
"""Of the owner's environment, with the secret."""
VICTIM_S = 0.5
"""When a host process does not answer for so long, it is looked at whether it was stopped."""
_IPC_CREAT, _IPC_RMID = 0o1000, 0
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.restype = ctypes.c_void_p


class Scene:
    """Canaries of one run: a file, a process, listeners, shared memory, the host's settings."""

    def __init__(self, is_control: bool = False) -> None:
        """`is_control`: whether programs are told that a protection was taken away."""
        self._is_control = is_control

    def __enter__(self) -> Scene:
        self.secret = f"host-{secrets.token_hex(8)}"
        self.neighbour_secret = f"neighbour-{secrets.token_hex(8)}"
        os.environ[VARIABLE] = self.secret
        self.directory = Path(tempfile.mkdtemp(prefix="etude-canary-", dir="/var/tmp"))
        self.directory.chmod(0o777)
        self.file = self.directory / "canary"
        self.shm_file = Path(f"/dev/shm/{self.directory.name}")
        for path in (self.file, self.shm_file):
            path.write_text(self.secret)
            path.chmod(0o644)
        self._open_listeners()
        self._segment, self._segment_key = _make_segment(self.secret)
        self._victim = self._start_victim()
        self._before = self._settings()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners.values():
            listener.close()
        self._end_victim()
        del os.environ[VARIABLE]
        _libc.shmctl(self._segment, _IPC_RMID, None)
        self.shm_file.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def facts(self) -> dict[str, Any]:
        """What an attacker may be told: where everything lies, but no secret."""
        return {
            "control": self._is_control,
            "variable": VARIABLE,
            "canary": str(self.file),
            "canary_dir": str(self.directory),
            "shm_file": str(self.shm_file),
            "victim": self._victim.pid,
            "port": self._port,
            "socket": str(self.directory / "socket"),
            "abstract": self.directory.name,
            "segment": self._segment_key,
            "handle": _file_handle(self.file),
            "mount": "/usr",
            "neighbour_port": self._neighbour_port,
            "neighbour": self.neighbour_secret.replace("neighbour", "word")[:12],
            "namespaces": {name: _namespace(name) for name in ("uts", "net", "ipc", "pid", "user")},
        }

    def damage(self, output: str) -> list[str]:
        """What has been done to the host since the last look; `output`: all that came out of the sandbox."""
        found = [f"{name} was reached" for name, listener in self._listeners.items() if _called(listener)]
        for secret in (self.secret, self.neighbour_secret):
            if secret in output:
                found.append(f"a secret of the {secret.partition('-')[0]} came out")
        if not self.file.exists() or self.file.read_text() != self.secret:
            found.append("the canary file was changed")
            self.file.write_text(self.secret)
        for extra in sorted({path.name for path in self.directory.iterdir()} - {"canary", "socket"}):
            found.append(f"a file {extra!r} appeared on the host")
            (self.directory / extra).unlink()
        found += self._victims_damage()
        after = self._settings()
        found += [f"{name} was changed" for name, value in after.items() if self._before[name] != value]
        self._before = after
        return found

    def _open_listeners(self) -> None:
        tcp = socket.create_server(("127.0.0.1", 0))
        abstract, path = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0{self.directory.name}")
        path.bind(str(self.directory / "socket"))
        (self.directory / "socket").chmod(0o777)
        self._listeners = {"the host's port": tcp, "an abstract socket": abstract, "a socket file": path}
        self._port = tcp.getsockname()[1]
        for listener in self._listeners.values():
            listener.listen(8)
            listener.setblocking(False)
        self._neighbour_port = free_port()

    def _start_victim(self) -> subprocess.Popen[bytes]:
        user: Any = NOBODY if os.geteuid() == 0 else None
        victim = subprocess.Popen(
            ["/usr/bin/python3", "-S", "-c", _VICTIM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            cwd="/",
        )
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"ready\n"
        return victim

    def _victims_damage(self) -> list[str]:
        """What the host process was told, up to now: it answers a question after its signals."""
        found: list[str] = []
        if self._victim.poll() is None:
            lines = self._ask_victim()
            found = [f"a host process got {line}" for line in lines[:-1]]
            if lines[-1:] != ["awake"]:
                found.append("a host process was stopped")
        if self._victim.poll() is not None or "stopped" in "".join(found):
            found.append("a host process was ended")
            self._end_victim()
            self._victim = self._start_victim()
        return found

    def _ask_victim(self) -> list[str]:
        stdin, stdout = self._victim.stdin, self._victim.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(b"?")
        said = b""
        while not said.endswith(b"awake\n"):
            if not select.select([stdout], [], [], VICTIM_S)[0]:
                if self._victims_stat()[0] in "Tt":
                    break
                continue
            part = os.read(stdout.fileno(), 4096)
            said += part
            if not part:
                break
        return said.decode().splitlines()

    def _end_victim(self) -> None:
        self._victim.kill()
        self._victim.wait()
        for pipe in (self._victim.stdin, self._victim.stdout):
            assert pipe is not None
            pipe.close()

    def _victims_stat(self) -> list[str]:
        """Of /proc/<pid>/stat: its state, its parent, and so on."""
        return Path(f"/proc/{self._victim.pid}/stat").read_text().rpartition(")")[2].split()

    def _settings(self) -> dict[str, str]:
        values = {name: path.read_text() for name in _SYSCTLS if (path := Path(f"/proc/sys/{name}")).exists()}
        limits = Path(f"/proc/{self._victim.pid}/limits").read_text()
        values["a host process's priority"] = self._victims_stat()[16]
        values["a host process's limits"] = limits
        return values


def _called(listener: socket.socket) -> bool:
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return False
    connection.close()
    return True


def _make_segment(secret: str) -> tuple[int, int]:
    """(id, key) of a System V segment with the secret, readable by everybody."""
    key = secrets.randbelow(1 << 30) + 1
    segment = _libc.shmget(key, ctypes.c_size_t(4096), _IPC_CREAT | 0o666)
    assert segment >= 0, os.strerror(ctypes.get_errno())
    address = _libc.shmat(segment, None, 0)
    ctypes.memmove(address, secret.encode(), len(secret))
    _libc.shmdt(ctypes.c_void_p(address))
    return segment, key


def _file_handle(path: Path) -> str:
    """Hex of the `struct file_handle` of a file; empty where its file system has none."""
    handle = ctypes.create_string_buffer(8 + 128)
    ctypes.memmove(handle, (128).to_bytes(4, "little"), 4)
    mount = ctypes.c_int()
    result = _libc.name_to_handle_at(_AT_FDCWD, str(path).encode(), handle, ctypes.byref(mount), 0)
    return "" if result < 0 else handle.raw[: 8 + int.from_bytes(handle.raw[:4], "little")].hex()


def _namespace(name: str) -> str:
    return str(Path(f"/proc/self/ns/{name}").readlink())
