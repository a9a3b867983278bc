"""Attempts to use up what the host has: processes, memory, disk, descriptors, time.

Controls are bounded by their own counts: a few hundred processes, files or megabytes.
"""

from __future__ import annotations

import dataclasses

from tests.adversary.escape.model import DEFAULT_RESOURCES, Attempt, Reach

_GROUPS = "control groups"
_SHARED: Reach = "shared kernel"
_HOLD = "\noutlast()\nescaped('300 MiB held')\n"

BOMBS = [
    Attempt(
        "fork without end",
        "RLIMIT_NPROC, and the pids control group",
        ("limit NPROC", _GROUPS),
        """
        count = 0
        try:
            while count < 150:
                if os.fork() == 0:
                    signal.pause()
                count += 1
        except OSError as error:
            refusal = error
        if count > 100:
            escaped(f"{count} processes")
        raise refusal
        """,
        resources=dataclasses.replace(DEFAULT_RESOURCES, memory_bytes=4 << 30),
    ),
    Attempt(
        "start threads without end",
        "RLIMIT_NPROC, and the pids control group",
        ("limit NPROC", _GROUPS),
        """
        import threading
        threading.stack_size(65536)
        try:
            for count in range(150):
                threading.Thread(target=signal.pause, daemon=True).start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, f"{count} threads")
        escaped(f"{count} threads")
        """,
    ),
    Attempt(
        "fill memory in one process",
        "RLIMIT_DATA, the memory control group or the watchdog",
        ("limit DATA", "memory watchdog", _GROUPS),
        """
        try:
            held = bytearray(300 << 20)
        except MemoryError:
            raise OSError(errno.ENOMEM, "MemoryError")
        for position in range(0, len(held), 4096):
            held[position] = 1
        """
        + _HOLD.replace("\n", "\n        "),
    ),
    Attempt(
        "fill memory in many processes",
        "the memory control group or the watchdog",
        ("memory watchdog", _GROUPS),
        """
        ready, children = os.pipe(), []
        for _ in range(6):
            pid = os.fork()
            if pid == 0:
                held = bytearray(b"x") * (50 << 20)
                os.write(ready[1], b"x")
                signal.pause()
            children.append(pid)
        for _ in children:
            hear(ready[0], 1, children)
        outlast()
        if all(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children):
            escaped("300 MiB held in six processes")
        raise OSError(errno.ENOMEM, "some were killed")
        """,
    ),
    Attempt(
        "fill memory through a shared mapping",
        "the memory control group or the watchdog",
        ("memory watchdog", _GROUPS),
        """
        import mmap
        held = mmap.mmap(-1, 300 << 20)
        for position in range(0, len(held), 4096):
            held[position] = 1
        """
        + _HOLD.replace("\n", "\n        "),
    ),
    Attempt(
        "fill memory with memfds",
        "the memory control group; without one memfd_create does not exist",
        ("allow memfd_create", _GROUPS),
        """
        held, block = [], bytes(1 << 20)
        for _ in range(15):
            held.append(os.memfd_create("x"))
            for _ in range(20):
                os.write(held[-1], block)
        """
        + _HOLD.replace("\n", "\n        "),
    ),
    Attempt(
        "fill memory with System V segments",
        "the memory control group; without one shmget does not exist",
        ("allow shmget", _GROUPS),
        """
        libc.shmat.restype = ctypes.c_void_p
        for _ in range(15):
            segment = check(libc.shmget(0, ctypes.c_size_t(20 << 20), 0o1600), "shmget")
            address = libc.shmat(segment, None, 0)
            ctypes.memset(address, 1, 20 << 20)
            libc.shmdt(ctypes.c_void_p(address))
        """
        + _HOLD.replace("\n", "\n        "),
    ),
    Attempt(
        "fill kernel memory with message queues",
        "the memory control group; without one msgget does not exist",
        ("allow msgget", _GROUPS),
        """
        message = ctypes.create_string_buffer(8 + 8192)
        message[0] = 1
        sent = 0
        while sent < 300 << 20:
            queue = check(libc.msgget(0, 0o1600), "msgget")
            while libc.msgsnd(queue, message, 8192, 0o4000) == 0:
                sent += 8192
        """
        + _HOLD.replace("\n", "\n        "),
    ),
    Attempt(
        "fill kernel memory with local sockets",
        "the memory control group, or the watchdog, which counts the buffers of sockets",
        ("memory watchdog", _GROUPS),
        """
        ready, children = os.pipe(), []
        block = bytes(65536)
        for _ in range(14):
            children.append(os.fork())
            if children[-1] == 0:
                held, sent = [], 0
                for _ in range(110):
                    held.append(socket.socketpair())
                    held[-1][0].setblocking(False)
                    try:
                        while True:
                            sent += held[-1][0].send(block)
                    except BlockingIOError:
                        pass
                os.write(ready[1], struct.pack("Q", sent))
                signal.pause()
        total = sum(struct.unpack("Q", hear(ready[0], 8, children))[0] for _ in children)
        if total < 300 << 20:
            raise OSError(errno.ENOMEM, f"{total >> 20} MiB")
        """
        + _HOLD.replace("\n", "\n        "),
    ),
    Attempt(
        "fill kernel memory with TCP connections",
        "RLIMIT_NOFILE, and the watchdog, which counts the buffers of sockets",
        ("limit NOFILE", "memory watchdog"),
        """
        listener = socket.create_server(("127.0.0.1", 0))
        held, sent, block = [], 0, bytes(65536)
        while sent < 300 << 20:
            one = socket.create_connection(listener.getsockname())
            held += [one, listener.accept()[0]]
            one.setblocking(False)
            try:
                while True:
                    sent += one.send(block)
            except BlockingIOError:
                pass
        """
        + _HOLD.replace("\n", "\n        "),
    ),
    Attempt(
        "fill the disk",
        "the size of the sandbox's tmpfs",
        ("tmpfs size",),
        """
        written, block = 0, bytes(1 << 20)
        for folder in ("/workspace", "/tmp", "/dev/shm"):
            with open(folder + "/big", "wb", buffering=0) as file:
                try:
                    while file.tell() < 15 << 20:
                        written += file.write(block)
                except OSError as error:
                    refusal = error
        if written >= 40 << 20:
            escaped(f"{written >> 20} MiB written")
        raise refusal
        """,
    ),
    Attempt(
        "use up the inodes",
        "the number of inodes of the sandbox's tmpfs",
        ("tmpfs inodes",),
        """
        for number in range(4000):
            os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
        escaped("4000 files")
        """,
        reach=_SHARED,
    ),
    Attempt(
        "write one huge file",
        "RLIMIT_FSIZE",
        ("limit FSIZE",),
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("big", "wb", buffering=0) as file:
            while file.tell() < 4 << 20:
                file.write(bytes(1 << 20))
        escaped("4 MiB in one file")
        """,
        resources=dataclasses.replace(DEFAULT_RESOURCES, file_bytes=1 << 20),
    ),
    Attempt(
        "open descriptors without end",
        "RLIMIT_NOFILE",
        ("limit NOFILE",),
        """
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(700)]
        escaped(f"{len(held)} descriptors")
        """,
    ),
    Attempt(
        "burn processor time without end",
        "RLIMIT_CPU",
        ("limit CPU",),
        """
        while time.process_time() < 1.5:
            pass
        escaped("1.5 s of processor time")
        """,
        resources=dataclasses.replace(DEFAULT_RESOURCES, cpu_s=1),
    ),
    Attempt(
        "lock memory",
        "RLIMIT_MEMLOCK",
        ("limit MEMLOCK",),
        """
        buffer = ctypes.create_string_buffer(4096)
        check(libc.mlock(buffer, ctypes.c_size_t(4096)), "mlock")
        escaped("a page is locked")
        """,
        reach=_SHARED,
    ),
    Attempt(
        "make a POSIX message queue",
        "RLIMIT_MSGQUEUE",
        ("limit MSGQUEUE",),
        """
        if not hasattr(libc, "mq_open"):
            impossible("no mq_open in this C library")
        check(libc.mq_open(b"/etude", os.O_CREAT | os.O_RDWR, 0o600, None), "mq_open")
        escaped("a queue")
        """,
        lifts_without_groups=("allow mq_open",),
        reach=_SHARED,
    ),
    Attempt(
        "dump core",
        "RLIMIT_CORE",
        ("limit CORE",),
        """
        pattern = open("/proc/sys/kernel/core_pattern").read().strip()
        if pattern.startswith(("|", "/")):
            impossible("cores of this host go elsewhere: " + pattern)
        os.chdir("/tmp")
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), 11)
            time.sleep(1)
        os.waitpid(pid, 0)
        cores = [name for name in os.listdir("/tmp") if "core" in name]
        if cores:
            escaped(cores[0])
        raise OSError(errno.EPERM, "no core")
        """,
        reach=_SHARED,
        resources=dataclasses.replace(DEFAULT_RESOURCES, disk_bytes=64 << 20),
    ),
]
