"""Acts on memory, processes, signals, output and time."""

from __future__ import annotations

from collections.abc import Mapping

SHARED = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def fill(total, piece=4 << 20):
    filled = 0
    while filled < total:
        if (pid := os.fork()) == 0:
            number = libc.shmget(0, piece, 0o1666)
            if number < 0:
                os._exit(1)
            ctypes.memset(libc.shmat(number, None, 0), 1, piece)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            break
        filled += piece
    return filled
"""

PROCESSES: Mapping[str, str] = {
    # Memory
    "more memory than there is": """
import subprocess, sys
subprocess.run([sys.executable, "-c", "x = bytearray(1 << 30)"])
""",
    "a forest of processes that hold memory": """
import os, time
for _ in range(12):
    if os.fork() == 0:
        os.setsid(); x = bytearray(8 << 20)
        for _ in range(0, len(x), 4096): x[_] = 1
        time.sleep(300)
""",
    "System V shared memory that outlives its processes": SHARED
    + """
fill(160 << 20)
open("ballast.bin", "wb").write(os.urandom(16 << 20))
""",
    "message queues": """
import ctypes
libc = ctypes.CDLL(None)
class Message(ctypes.Structure): _fields_ = [("kind", ctypes.c_long), ("text", ctypes.c_char * 8000)]
message = Message(1, b"x" * 7999)
for _ in range(2000):
    number = libc.msgget(0, 0o1666)
    if number < 0: break
    for _ in range(8): libc.msgsnd(number, ctypes.byref(message), 8000, 0o4000)
""",
    "semaphores": """
import ctypes
libc = ctypes.CDLL(None)
for _ in range(500):
    if libc.semget(0, 250, 0o1666) < 0: break
""",
    "POSIX shared memory": """
try:
    for number in range(100):
        with open(f"/dev/shm/{number}", "wb") as file: file.write(bytes(1 << 20))
except OSError: pass
""",
    "memory in files without a name": """
import os, time
if os.fork() == 0:
    os.setsid()
    try:
        for _ in range(20):
            descriptor = os.memfd_create("x"); os.write(descriptor, bytes(8 << 20))
    except OSError: pass
    time.sleep(300)
""",
    "memory in buffers of pipes and sockets": """
import os, socket, time
if os.fork() == 0:
    os.setsid(); kept = []
    try:
        for _ in range(100):
            pair = socket.socketpair(); pair[0].setblocking(False); kept.append(pair)
            try:
                while True: pair[0].send(bytes(1 << 16))
            except BlockingIOError: pass
    except OSError: pass
    time.sleep(300)
""",
    # Processes
    "a fork bomb": """
import os, time
if os.fork() == 0:
    os.setsid()
    end = time.time() + 3
    while time.time() < end:
        try: os.fork()
        except OSError: time.sleep(0.01)
    time.sleep(300)
""",
    "processes that ignore every signal": """
import os, signal, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: time.sleep(1)
""",
    "processes that are stopped": """
import os, signal
for _ in range(5):
    if os.fork() == 0: os.setsid(); os.kill(os.getpid(), signal.SIGSTOP)
""",
    "a writer that goes on while it is graded": """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        for number in range(200):
            try: open(f"w-{number % 50}", "w").write("x" * number)
            except OSError: pass
        os.makedirs("wd/e/f", exist_ok=True)
        try: os.removedirs("wd/e/f")
        except OSError: pass
""",
    "processors kept busy": """
import os
for _ in range(16):
    if os.fork() == 0:
        os.setsid()
        while True: pass
""",
    "orphans and zombies": """
import os, time
for _ in range(30):
    if os.fork() == 0:
        if os.fork() == 0: time.sleep(0.2)
        os._exit(0)
if os.fork() == 0:
    os.setsid()
    for _ in range(5):
        if os.fork() == 0: os._exit(0)
    time.sleep(300)
""",
    "descriptors in flight": """
import array, os, socket, time
if os.fork() == 0:
    os.setsid(); kept = []
    try:
        for _ in range(50):
            one, two = socket.socketpair(); kept += [one, two]
            one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))])
    except OSError: pass
    time.sleep(300)
""",
    "watches, timers and polls": """
import ctypes, os, select, time
libc = ctypes.CDLL(None)
if os.fork() == 0:
    os.setsid()
    for _ in range(100):
        number = libc.inotify_init1(0)
        if number >= 0: libc.inotify_add_watch(number, b".", 0xFFF)
        timer = ctypes.c_void_p(); libc.timer_create(0, None, ctypes.byref(timer))
        try: select.epoll()
        except OSError: pass
    time.sleep(300)
""",
    "locks and leases": """
import fcntl, os, time
if os.fork() == 0:
    os.setsid()
    kept = [open(path, "r+") for path in ("lib/tally.py", "tests/test_all.py")]
    for file in kept:
        fcntl.flock(file, fcntl.LOCK_EX)
        try: fcntl.fcntl(file, 1024, fcntl.F_WRLCK)
        except OSError: pass
    time.sleep(300)
""",
    # Signals
    "signals to the server": """
import os
for number in [*range(1, 32), *range(34, 65)] * 3:
    try: os.kill(1, number)
    except OSError: pass
""",
    "alarms that never end for the server": """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    while True:
        try: os.kill(1, signal.SIGALRM)
        except OSError: pass
        time.sleep(0.0005)
""",
    "a group of its own that it signals": """
import os, signal
for _ in range(3):
    try: os.kill(0, signal.SIGCONT); os.kill(-1, signal.SIGCONT); os.killpg(0, signal.SIGWINCH)
    except OSError: pass
""",
    "the server's limits and priority": """
import os, resource
for number in range(16):
    try: resource.prlimit(1, number, (0, 0))
    except (OSError, ValueError): pass
for change in (lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), lambda: os.sched_setaffinity(1, {0})):
    try: change()
    except OSError: pass
for name in ("oom_score_adj", "coredump_filter", "timerslack_ns", "clear_refs"):
    try: open(f"/proc/1/{name}", "w").write("1000")
    except OSError: pass
""",
    "itself killed": """
import os
os.kill(os.getpid(), 9)
""",
    # Output and time
    "output without an end": """
import os
try:
    for _ in range(100): os.write(1, os.urandom(1 << 18))
except OSError: pass
""",
    "output of bytes that are no text": """
import os
os.write(1, bytes(range(256)) * 50 + b"\\xed\\xa0\\x80" * 100); os.write(2, b"\\xff" * 5000)
""",
    "a command beyond its time": """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(300)
""",
    "input and terminal closed": """
import os
for number in (0, 1, 2): os.close(number)
if os.fork() == 0:
    os.setsid()
    import time; time.sleep(300)
""",
}
