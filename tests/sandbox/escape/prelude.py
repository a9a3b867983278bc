"""What every program of the table begins and ends with."""

from __future__ import annotations

import textwrap

from tests.sandbox.escape.calls import NUMBERS

_PRELUDE = f"""
import ctypes, errno, json, os, platform, socket, struct, sys, time
FACTS = json.loads(os.environ.get("FACTS", "{{}}"))
NUMBERS = {NUMBERS!r}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
PTRACE_SEIZE, MS_REMOUNT, MS_BIND = 0x4206, 32, 4096

def check(result, what=""):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, what)
    return result

def call(name, *arguments):
    if name not in NUMBERS:
        impossible(name + " is no call of this machine")
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return check(libc.syscall(ctypes.c_long(NUMBERS[name]), *values), name)

def say(text):
    print(text, flush=True)

def escaped(what):
    say("ESCAPED " + str(what))
    os._exit(0)

def impossible(why):
    say("IMPOSSIBLE " + str(why))
    os._exit(0)

def pids():
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())

def first_process():
    # The sandbox's server: the first ancestor that is in another session. Pid 1, unless that was taken away.
    pid, mine = os.getpid(), os.getsid(0)
    while pid > 1:
        with open(f"/proc/{{pid}}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if int(fields[3]) != mine:
            return pid
        pid = int(fields[1])
    return 1
"""


def whole_program(body: str) -> str:
    """The source that is run inside: refusals are said with the name of their error."""
    return (
        _PRELUDE
        + "try:\n"
        + textwrap.indent(textwrap.dedent(body).strip() + "\n", "    ")
        + "except OSError as error:\n"
        + "    say(f'refused: {errno.errorcode.get(error.errno, error.errno)} {error}')\n"
    )
