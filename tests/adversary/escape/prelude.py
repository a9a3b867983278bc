"""The first and last lines of every attempt's program."""

from __future__ import annotations

import textwrap

from tests.adversary.escape.calls import NUMBERS

_PRELUDE = f"""
import ctypes, errno, json, os, platform, select, signal, socket, struct, sys, time
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

def without_resource_right():
    # Some hosts' own root lacks CAP_SYS_RESOURCE: then nothing is shown by taking protections away.
    row = next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
    if FACTS.get("control") and os.getuid() == 0 and not int(row.split()[1], 16) >> 24 & 1:
        impossible("this host's root may not do it either")

def num_looks():
    # How often the sandbox's server has woken: it does so to look at the memory of what runs.
    with open("/proc/1/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))

def outlast():
    # Returns once whatever bounds memory has had its chance, on a machine of any load.
    if not FACTS.get("server_looks"):
        time.sleep(60)  # whoever is over a bound is ended within it
        return
    enough = num_looks() + 5
    while num_looks() < enough:
        time.sleep(0.05)

def hear(reader, size, children):
    # What one of the children writes; OSError if one of them has ended instead.
    while not select.select([reader], [], [], 0.05)[0]:
        if any(os.waitpid(pid, os.WNOHANG)[0] for pid in children):
            raise OSError(errno.ENOMEM, "a process has ended")
    return os.read(reader, size)

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
