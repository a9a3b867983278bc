"""Attempts on processes, sockets and shared memory: of the host, of the server, of a neighbour."""

from __future__ import annotations

from tests.adversary.escape.model import Attempt

_USERNS = "user namespace"
_CAPS = "capabilities dropped"
_SIGHT = ("pid namespace", "outer pid namespace")
_PIDS = (*_SIGHT, "user of its own")
_HIDDEN = "host processes have no number inside: pid namespaces"

PROCESSES = [
    Attempt(
        "signal a host process",
        _HIDDEN,
        _PIDS,
        """
        os.kill(FACTS["victim"], 10)
        """,
    ),
    Attempt(
        "signal a host process by a pidfd",
        _HIDDEN,
        _PIDS,
        """
        descriptor = call("pidfd_open", FACTS["victim"], 0)
        call("pidfd_send_signal", descriptor, 10, None, 0)
        """,
    ),
    Attempt(
        "have the kernel signal a host process",
        _HIDDEN,
        _PIDS,
        """
        import fcntl
        one, two = socket.socketpair()
        fcntl.fcntl(one, fcntl.F_SETOWN, FACTS["victim"])
        fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        two.send(b"x")
        time.sleep(0.01)
        """,
    ),
    Attempt(
        "change a host process's priority",
        _HIDDEN,
        _PIDS,
        """
        os.setpriority(os.PRIO_PROCESS, FACTS["victim"], 19)
        """,
    ),
    Attempt(
        "change a host process's limits",
        _HIDDEN,
        _PIDS,
        """
        import resource
        resource.prlimit(FACTS["victim"], resource.RLIMIT_CORE, (0, 0))
        resource.prlimit(FACTS["victim"], resource.RLIMIT_NOFILE, (60, 60))
        """,
    ),
    Attempt(
        "trace a host process",
        "no number inside, ptrace refused, another user namespace",
        (*_SIGHT, "allow ptrace", _USERNS, _CAPS),
        """
        call("ptrace", PTRACE_SEIZE, FACTS["victim"], 0, 0)
        escaped("traced")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "see host processes in /proc",
        "a /proc of its own pid namespace",
        _SIGHT,
        """
        import glob
        if os.path.exists(f"/proc/{FACTS['victim']}/comm"):
            escaped(f"pid {FACTS['victim']} is in sight")
        raise OSError(errno.ENOENT, f"{len(pids())} processes in sight")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "kill the sandbox's first process",
        "the kernel shields pid 1 of a pid namespace",
        ("pid namespace",),
        """
        server = first_process()
        for number in (signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP, signal.SIGKILL):
            os.kill(server, number)
        time.sleep(0.1)
        state = open(f"/proc/{server}/stat").read().rpartition(")")[2].split()[0]
        if state in "TZX":
            escaped("stopped or dead")
        raise OSError(errno.EPERM, "it lives")
        """,
    ),
    Attempt(
        "trace the sandbox's first process",
        "ptrace is refused, and pid 1 is not dumpable",
        ("allow ptrace", "pid 1 not dumpable"),
        """
        call("ptrace", PTRACE_SEIZE, 1, 0, 0)
        escaped("traced")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "read the first process's memory by /proc",
        "pid 1 is not dumpable",
        ("pid 1 not dumpable",),
        """
        row = next(line for line in open("/proc/1/maps") if "[heap]" in line or " rw-p" in line)
        start = int(row.split("-")[0], 16)
        with open("/proc/1/mem", "rb", buffering=0) as memory:
            memory.seek(start)
            escaped(f"{len(memory.read(4096))} bytes")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "read the first process's memory by process_vm_readv",
        "process_vm_readv is refused, and pid 1 is not dumpable",
        ("allow process_vm_readv", "pid 1 not dumpable"),
        """
        try:
            row = next(line for line in open("/proc/1/maps") if " rw-p" in line)
            start = int(row.split("-")[0], 16)
        except OSError:
            start = ctypes.addressof(ctypes.create_string_buffer(1))
        buffer = ctypes.create_string_buffer(64)
        local = struct.pack("PP", ctypes.addressof(buffer), 64)
        remote = struct.pack("PP", start, 64)
        call("process_vm_readv", 1, local, 1, remote, 1, 0)
        escaped("64 bytes")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "take the server's descriptors by pidfd_getfd",
        "pidfd_getfd does not exist, and pid 1 is not dumpable",
        ("allow pidfd_getfd", "pid 1 not dumpable"),
        """
        import stat
        first = call("pidfd_open", 1, 0)
        for number in range(64):
            try:
                descriptor = call("pidfd_getfd", first, number, 0)
            except OSError as error:
                if error.errno == errno.EBADF:
                    continue
                raise
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                escaped(f"the owner's line is descriptor {number}")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "climb out through the first process's directories",
        "pid 1 is not dumpable: its descriptors cannot be named",
        ("pid 1 not dumpable",),
        """
        for number in os.listdir("/proc/1/fd"):
            above = f"/proc/1/fd/{number}/.."
            if os.path.isdir(above):
                for name in os.listdir(above):
                    path = f"{above}/{name}/secret.txt"
                    if os.path.exists(path):
                        say(open(path).read())
        """,
        neighbour=True,
    ),
    Attempt(
        "read the first process's environment and directory",
        "pid 1 is not dumpable",
        ("pid 1 not dumpable",),
        """
        data = open("/proc/1/environ", "rb").read()
        os.readlink("/proc/1/cwd")
        escaped(f"{len(data)} bytes of environment")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "slow the first process down",
        "scheduling of another process is refused",
        ("allow setpriority", "allow sched_setscheduler"),
        """
        os.setpriority(os.PRIO_PROCESS, 1, 19)
        os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))
        escaped(f"nice {os.getpriority(os.PRIO_PROCESS, 1)}, class {os.sched_getscheduler(1)}")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "choose the first process as the kernel's victim",
        "its oom_score_adj is root's, for it is not dumpable",
        ("pid 1 not dumpable",),
        """
        os.write(os.open("/proc/1/oom_score_adj", os.O_WRONLY), b"1000")
        escaped("oom_score_adj of pid 1 is 1000")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "connect to the host's loopback",
        "a network namespace of its own",
        ("network namespace",),
        """
        socket.create_connection(("127.0.0.1", FACTS["port"]), timeout=60)
        """,
    ),
    Attempt(
        "connect to an abstract socket of the host",
        "a network namespace of its own",
        ("network namespace",),
        """
        socket.socket(socket.AF_UNIX).connect("\\0" + FACTS["abstract"])
        """,
    ),
    Attempt(
        "connect to a socket file of the host",
        "pivot_root into a root of its own",
        ("show /var/tmp",),
        """
        socket.socket(socket.AF_UNIX).connect(FACTS["socket"])
        """,
    ),
    Attempt(
        "find a way out of its network",
        "a network namespace with nothing but a loopback",
        ("network namespace",),
        """
        # A datagram socket that is "connected" sends nothing: it only looks a route up.
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
            if not interfaces:
                raise
            escaped(interfaces)
        escaped("a route to 192.0.2.1")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "open a netlink socket",
        "the filter knows UNIX and IP sockets only",
        ("allow socket",),
        """
        socket.socket(16, socket.SOCK_RAW, 0)
        escaped("netlink")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "open a packet socket",
        "the filter knows UNIX and IP sockets only; needs CAP_NET_RAW",
        ("allow socket", _CAPS),
        """
        socket.socket(17, socket.SOCK_RAW, 0)
        escaped("packets")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "open a raw IP socket",
        "needs CAP_NET_RAW",
        (_CAPS,),
        """
        socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
        escaped("raw IP")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "open a vsock socket",
        "the filter knows UNIX and IP sockets only: no namespace contains vsock",
        ("allow socket",),
        """
        try:
            socket.socket(40, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT and FACTS.get("control"):
                impossible("this kernel has no vsock")
            raise
        escaped("vsock")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "use the kernel's cryptography by a socket",
        "the filter knows UNIX and IP sockets only",
        ("allow socket",),
        """
        try:
            socket.socket(38, socket.SOCK_SEQPACKET)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT and FACTS.get("control"):
                impossible("this kernel has no AF_ALG")
            raise
        escaped("AF_ALG")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "attach to shared memory of the host",
        "an IPC namespace of its own",
        ("ipc namespace",),
        """
        libc.shmat.restype = ctypes.c_void_p
        segment = check(libc.shmget(FACTS["segment"], 0, 0), "shmget")
        address = libc.shmat(segment, None, 0o10000)
        say(ctypes.string_at(address, 40).split(bytes(1))[0].decode())
        """,
        lifts_without_groups=("allow shmget",),
    ),
    Attempt(
        "signal a process of another sandbox",
        "a pid namespace of its own",
        ("pid namespace", "user of its own"),
        """
        for pid in pids():
            try:
                row = open(f"/proc/{pid}/cmdline").read()
            except OSError:
                continue
            if FACTS["neighbour"] in row and pid != os.getpid():
                os.kill(pid, 10)
        time.sleep(0.1)
        """,
        neighbour=True,
    ),
    Attempt(
        "read the memory of a process of another sandbox",
        "pid namespaces, and user namespaces that do not own each other",
        ("pid namespace", _USERNS),
        """
        for pid in pids():
            try:
                row = open(f"/proc/{pid}/cmdline").read()
            except OSError:
                continue
            if FACTS["neighbour"] in row and pid != os.getpid():
                maps = [line.split()[0].split("-") for line in open(f"/proc/{pid}/maps") if " rw-p" in line]
                with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                    for start, end in maps:
                        memory.seek(int(start, 16))
                        try:
                            data = memory.read(int(end, 16) - int(start, 16))
                        except OSError:
                            continue
                        at = data.find(b"neighbour-")
                        if at >= 0:
                            say(data[at:at + 26].decode(errors="replace"))
        """,
        neighbour=True,
    ),
    Attempt(
        "read the files of another sandbox by /proc",
        "pid namespaces, and user namespaces that do not own each other",
        ("pid namespace", _USERNS),
        """
        for pid in pids():
            try:
                say(open(f"/proc/{pid}/root/workspace/secret.txt").read())
            except OSError:
                continue
        """,
        neighbour=True,
    ),
    Attempt(
        "connect to a port of another sandbox",
        "a network namespace of its own",
        ("network namespace",),
        """
        say(socket.create_connection(("127.0.0.1", FACTS["neighbour_port"]), timeout=60).recv(100).decode())
        """,
        neighbour=True,
    ),
    Attempt(
        "connect to an abstract socket of another sandbox",
        "a network namespace of its own",
        ("network namespace",),
        """
        link = socket.socket(socket.AF_UNIX)
        link.connect("\\0" + FACTS["neighbour"])
        say(link.recv(100).decode())
        """,
        neighbour=True,
    ),
]
