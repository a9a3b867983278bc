"""Kernel resources limited per user or per host: how a sandbox exhausts each, and who needs it."""

from __future__ import annotations

from dataclasses import dataclass

from etude.sandbox.inside.namespaces import PENDING_SIGNALS, WATCHES
from etude.sandbox.types import Resources

RESOURCES = Resources(memory_bytes=256 << 20, disk_bytes=192 << 20)
PRELUDE = """
import ctypes, fcntl, os, resource, select, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
kept = []

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def count(take, most):
    # How often `take` works.
    for number in range(most):
        try:
            take()
        except (OSError, RuntimeError) as error:
            print(error, file=sys.stderr)
            return number
    return most

def send_descriptors(number):
    import array
    if not kept:
        kept.extend([*socket.socketpair(), os.open("/dev/null", os.O_RDONLY)])
    kept[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [kept[2]] * number))])

def take_pipe(size):
    reader, writer = os.pipe()
    kept.append((reader, writer))
    if fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ) < 65536:
        raise OSError("a small pipe")
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, size)

def watch_events():
    # Every pair of a descriptor and what looks for its events counts once.
    if not kept:
        half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 10
        kept.extend(([select.epoll() for _ in range(half)], [socket.socket() for _ in range(half)], iter([])))
        kept[2] = ((epoll, each) for epoll in kept[0] for each in kept[1])
    pair = next(kept[2], None)
    if pair is None:
        raise OSError("every pair")
    pair[0].register(pair[1])

def watch_files():
    if not kept:
        kept.append(check(libc.inotify_init()))
    name = "/tmp/watched-%d" % len(kept)
    open(name, "w").close()
    kept.append(check(libc.inotify_add_watch(kept[0], name.encode(), 2)))

def queue_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    check(libc.sigqueue(os.getpid(), signal.SIGRTMIN, None))

def start_timer():
    check(libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())))

def fork():
    if os.fork() == 0:
        signal.pause()

def start_thread():
    threading.stack_size(1 << 16)
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()

def open_files():
    # One process more, with all the descriptors that it may have.
    reader, writer = os.pipe()
    if os.fork() == 0:
        while True:
            try:
                os.open("/dev/null", os.O_RDONLY)
            except OSError:
                os.write(writer, b"x")
                signal.pause()
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)

def lock_memory():
    kept.append(ctypes.create_string_buffer(8192))
    check(libc.mlock(kept[-1], ctypes.c_size_t(8192)))

def add_key():
    number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
    name = b"%d" % time.monotonic_ns()
    check(libc.syscall(number, b"user", name, b"x", ctypes.c_size_t(1), -2))

def open_queue():
    check(libc.mq_open(b"/%d" % time.monotonic_ns(), os.O_CREAT | os.O_RDWR, 0o600, None))

def attach_filter():
    program = struct.pack("HBBI", 0x06, 0, 0, 0xFFFF) * 4096
    buffer = ctypes.create_string_buffer(program, len(program))
    kept.extend([socket.socket(socket.AF_INET, socket.SOCK_DGRAM), buffer])
    kept[-2].setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 4096, ctypes.addressof(buffer)))

def set_up_io():
    context = ctypes.c_ulong(0)
    check(libc.syscall({"x86_64": 206, "aarch64": 0}[os.uname().machine], 1000, ctypes.byref(context)))
"""


@dataclass(frozen=True)
class Kind:
    """One count. `take` and `need` are calls of the prelude."""

    take: str
    """Takes one more, or a few."""
    most: int
    """How often that may work in one sandbox."""
    bound: tuple[str, ...]
    """What keeps it there, by the names in `tests.adversary.escape.weakening`."""
    need: str = ""
    """What has to work in another sandbox `num_needed` times; empty: nobody has any of it."""
    num_needed: int = 16
    resources: Resources = RESOURCES


ROOMY = Resources(memory_bytes=2 << 30, open_files=5000)
MAX_PAIRS = (ROOMY.open_files // 2 - 10) ** 2
"""Epoll watches of one process. The kernel grants a user some 230,000 for each GiB of memory."""
_OPEN = RESOURCES.open_files
_OWN = ("user of its own",)
_UNBOUNDED = 1 << 20
KINDS = {
    "descriptors in flight": Kind("send_descriptors(50)", 2 * _OPEN // 50, _OWN, "send_descriptors(10)"),
    "pages of pipes": Kind("take_pipe(1 << 20)", _UNBOUNDED, _OWN, "take_pipe(65536)"),
    "epoll watches": Kind("watch_events()", MAX_PAIRS, _OWN, "watch_events()", 1000, ROOMY),
    "inotify instances": Kind(
        "kept.append(check(libc.inotify_init()))",
        WATCHES["max_inotify_instances"],
        ("counts of watches",),
        "watch_files()",
    ),
    "inotify watches": Kind(
        "watch_files()", WATCHES["max_inotify_watches"], ("counts of watches",), "watch_files()", 100
    ),
    "pending signals": Kind(
        "queue_signal()", PENDING_SIGNALS, ("limit SIGPENDING",), "queue_signal(), start_timer()", 32
    ),
    "timers": Kind(
        "start_timer()", PENDING_SIGNALS, ("limit SIGPENDING",), "queue_signal(), start_timer()", 32
    ),
    "processes": Kind("fork()", RESOURCES.num_processes, ("limit NPROC", "control groups"), "fork()"),
    "process ids": Kind(
        "start_thread()", RESOURCES.num_processes, ("limit NPROC", "control groups"), "start_thread()"
    ),
    "open files": Kind(
        "open_files()",
        RESOURCES.num_processes,
        ("limit NPROC", "control groups"),
        "kept.append(open('/dev/null'))",
        200,
    ),
    "keys": Kind("add_key()", 0, ("allow add_key",)),
    "message queues": Kind("open_queue()", 0, ("limit MSGQUEUE",)),
    "locked memory": Kind("lock_memory()", 0, ("limit MEMLOCK",)),
    "asynchronous I/O contexts": Kind("set_up_io()", 0, ("allow io_setup",)),
    "packet filters": Kind("attach_filter()", 0, ("allow setsockopt",)),
    "pseudo-terminals": Kind("os.openpty()", 0, ()),
}
