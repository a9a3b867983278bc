"""Attempts to gain, or to use, rights that a sandbox's processes do not have."""

from __future__ import annotations

from tests.adversary.escape.model import Attempt

_USERNS = "user namespace"
_CAPS = "capabilities dropped"
_ROOT = (_USERNS, _CAPS)


def _surface(name: str, protects: str, lifts: tuple[str, ...], program: str, outside: str = "") -> Attempt:
    return Attempt(name, protects, lifts, program, reach="shared kernel", outside=outside)


RIGHTS = [
    _surface(
        "shield itself from the kernel's killer",
        "a lower oom_score_adj needs the host's CAP_SYS_RESOURCE",
        _ROOT,
        """
        without_resource_right()
        os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000")
        escaped("oom_score_adj is -1000")
        """,
    ),
    _surface(
        "raise its hard limits",
        "needs the host's CAP_SYS_RESOURCE",
        _ROOT,
        """
        import resource
        without_resource_right()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most * 2, most * 2))
        escaped(f"{most * 2} descriptors")
        """,
    ),
    _surface(
        "raise the counts of its namespace",
        "settings of its user namespace need CAP_SYS_RESOURCE there",
        (_CAPS,),
        """
        os.write(os.open("/proc/sys/user/max_inotify_instances", os.O_WRONLY), b"100000")
        escaped("max_inotify_instances was raised")
        """,
    ),
    _surface(
        "take a processor for itself",
        "a higher priority needs the host's CAP_SYS_NICE",
        _ROOT,
        """
        os.setpriority(os.PRIO_PROCESS, 0, -10)
        escaped("10 above all others")
        """,
    ),
    _surface(
        "take the disk for itself",
        "a real-time class of the disk needs the host's CAP_SYS_NICE",
        _ROOT,
        """
        call("ioprio_set", 1, 0, 1 << 13)
        escaped("the real-time class")
        """,
    ),
    _surface(
        "wake the machine from its sleep",
        "alarms need the host's CAP_WAKE_ALARM",
        _ROOT,
        """
        try:
            call("timerfd_create", 9, 0)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                impossible("this machine has no clock that wakes it")
            raise
        escaped("an alarm")
        """,
    ),
    _surface(
        "overwrite its interpreter through /proc/self/exe",
        "the programs are root's, behind a read-only overlay",
        (_USERNS, "own view of programs"),
        """
        # While it runs the kernel refuses with ETXTBSY: behind its look at rights and mounts.
        try:
            os.close(os.open("/proc/self/exe", os.O_WRONLY))
        except OSError as error:
            if error.errno != errno.ETXTBSY:
                raise
        escaped("the interpreter may be written to")
        """,
    ),
    _surface(
        "hang up terminals",
        "vhangup is refused, and needs the host's CAP_SYS_TTY_CONFIG",
        ("allow vhangup", *_ROOT),
        """
        call("vhangup")
        escaped("vhangup")
        """,
    ),
    _surface(
        "have the kernel write accounts of processes",
        "acct is refused, and needs the host's CAP_SYS_PACCT",
        ("allow acct", *_ROOT),
        """
        # Into a file that is not there.
        try:
            call("acct", b"/nonexistent/file")
        except OSError as error:
            if error.errno == errno.ENOENT:
                escaped("acct would be permitted")
            if error.errno == errno.ENOSYS and FACTS.get("control"):
                impossible("this kernel keeps no accounts")
            raise
        """,
    ),
    _surface(
        "use the machine's ports",
        "ioperm is refused, and needs the host's CAP_SYS_RAWIO",
        ("allow ioperm", *_ROOT),
        """
        try:
            call("ioperm", 0x80, 1, 1)
        except OSError as error:
            if error.errno == errno.ENOSYS:
                impossible("this kernel lends no ports")
            raise
        escaped("port 0x80")
        """,
    ),
    _surface(
        "compare its descriptors with the server's",
        "kcmp is refused, and pid 1 is not dumpable",
        ("allow kcmp", "pid 1 not dumpable"),
        """
        try:
            call("kcmp", os.getpid(), 1, 1, 0, 0)
        except OSError as error:
            if error.errno == errno.ENOSYS:
                impossible("this kernel has no kcmp")
            raise
        escaped("an order of the kernel's addresses")
        """,
    ),
    _surface(
        "climb to the namespace above its own",
        "the kernel hands out no namespace above the caller's own user namespace",
        (),
        """
        import fcntl
        for name in ("user", "pid", "mnt", "net", "uts"):
            for ask in (0xB701, 0xB702):
                try:
                    above = fcntl.ioctl(os.open("/proc/self/ns/" + name, os.O_RDONLY), ask)
                    if os.fstat(above).st_ino != os.stat("/proc/self/ns/user").st_ino:
                        escaped(f"{name} leads to {os.readlink(f'/proc/self/fd/{above}')}")
                except OSError as error:
                    refusal = error
        raise refusal
        """,
        outside="""
        import fcntl
        done, going = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            check(libc.unshare(0x10000000), "unshare")
            os.write(done[1], b"x")
            os.read(going[0], 1)
            os._exit(0)
        os.read(done[0], 1)
        above = fcntl.ioctl(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY), 0xB702)
        os.write(going[1], b"x")
        os.waitpid(pid, 0)
        if os.fstat(above).st_ino == os.stat("/proc/self/ns/user").st_ino:
            escaped("the namespace above")
        """,
    ),
    _surface(
        "map more users into its user namespace",
        "the kernel takes one map, and it is written before the sandbox begins",
        (),
        """
        os.write(os.open("/proc/self/uid_map", os.O_WRONLY), b"0 0 1")
        escaped("another map")
        """,
        outside="""
        user = os.getuid()
        check(libc.unshare(0x10000000), "unshare")
        os.write(os.open("/proc/self/uid_map", os.O_WRONLY), f"0 {user} 1".encode())
        if os.getuid() == 0:
            escaped("a map")
        """,
    ),
    _surface(
        "become another user",
        "no other user is mapped, and CAP_SETUID is gone",
        _ROOT,
        """
        check(libc.setuid(7), "setuid")
        if os.getuid() == 7:
            escaped("user 7")
        """,
    ),
    _surface(
        "raise the rights that were given up",
        "the bounding set is empty",
        (_CAPS,),
        """
        row = next(line for line in open("/proc/self/status") if line.startswith("CapBnd"))
        every = int(row.split()[1], 16)
        words = [every & 0xFFFFFFFF, every >> 32]
        data = struct.pack("IIIIII", words[0], words[0], 0, words[1], words[1], 0)
        call("capset", struct.pack("II", 0x20080522, 0), data)
        row = next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
        if int(row.split()[1], 16):
            escaped(row)
        raise OSError(errno.EPERM, "still none")
        """,
    ),
    _surface(
        "give a file to another user",
        "no other user is mapped, and CAP_CHOWN is gone",
        _ROOT,
        """
        open("/tmp/gift", "w").write("x")
        os.chown("/tmp/gift", 7, 7)
        if os.stat("/tmp/gift").st_uid == 7:
            escaped("a file of user 7")
        """,
    ),
    _surface(
        "give a program rights of its own",
        "capabilities of files need CAP_SETFCAP",
        (_CAPS,),
        """
        open("/tmp/program", "w").write("x")
        os.setxattr("/tmp/program", "security.capability", struct.pack("<IIIII", 0x02000001, 32, 0, 0, 0))
        escaped("a file with capabilities")
        """,
    ),
    _surface(
        "leave a file that nobody may remove",
        "attributes of that kind need the host's CAP_LINUX_IMMUTABLE",
        _ROOT,
        """
        import fcntl
        with open("/tmp/stays", "w") as file:
            try:
                fcntl.ioctl(file, 0x40086602, struct.pack("l", 0x10))
            except OSError as error:
                if error.errno == errno.ENOTTY:
                    impossible("this kernel's tmpfs has no such attribute")
                raise
        escaped("an immutable file")
        """,
    ),
    _surface(
        "configure its network",
        "addresses need CAP_NET_ADMIN",
        (_CAPS,),
        """
        import fcntl
        request = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("10.9.8.7"))
        fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8916, request)
        escaped("an address of its own")
        """,
    ),
    _surface(
        "have sockets of a size that nobody counts",
        "sizes of buffers stay as they are",
        ("allow setsockopt",),
        """
        one, _ = socket.socketpair()
        before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * before)
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) != before:
            escaped("another size")
        raise OSError(errno.EPERM, "the size stays")
        """,
    ),
    _surface(
        "have sockets of a kind that nobody counts",
        "the filter knows TCP, UDP and ICMP only",
        ("allow socket",),
        """
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        for kind, protocol in ((stream, 262), (stream, 132), (datagram, 136)):
            try:
                socket.socket(socket.AF_INET, kind, protocol)
            except OSError as error:
                refusal = error
            else:
                escaped(f"protocol {protocol}")
        if FACTS.get("control"):
            impossible("this kernel has no other protocols")
        raise refusal
        """,
    ),
    Attempt(
        "use a descriptor that it was not given",
        "programs are started with their own three descriptors",
        (),
        """
        mine = os.open("/proc/self/fd", os.O_RDONLY)
        names = {int(name) for name in os.listdir(mine)} - {0, 1, 2, mine}
        found = []
        for number in names:
            try:
                found.append(os.readlink(f"/proc/self/fd/{number}"))
            except FileNotFoundError:
                pass
        if found:
            escaped(found)
        raise OSError(errno.EBADF, "no other descriptor")
        """,
        outside="""
        mine = os.open("/proc/self/fd", os.O_RDONLY)
        names = {int(name) for name in os.listdir(mine)} - {0, 1, 2, mine}
        if any(os.path.exists(f"/proc/self/fd/{number}") for number in names):
            escaped(names)
        """,
    ),
    Attempt(
        "find the owner's secrets in its environment",
        "commands and servers have an environment of their own",
        (),
        """
        seen = []
        for pid in pids():
            try:
                seen.append(open(f"/proc/{pid}/environ", "rb").read())
            except OSError:
                continue
        if any(FACTS["variable"].encode() + b"=" in text for text in seen):
            escaped("the owner's variable")
        raise OSError(errno.ENOENT, f"not in {len(seen)} environments")
        """,
        outside="""
        if FACTS["variable"] in os.environ:
            escaped("the owner's variable")
        """,
    ),
    Attempt(
        "speak to a guest's host by a console",
        "no console in /dev that it may open",
        ("show /dev", _USERNS),
        """
        import glob
        names = [n for p in ("ttyS*", "hvc*", "vport*", "virtio-ports/*", "ttyAMA*", "console")
                 for n in glob.glob("/dev/" + p)]
        for name in names:
            try:
                os.close(os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
            except OSError:
                continue
            escaped(name)
        raise OSError(errno.ENOENT, f"none of {len(names)}")
        """,
    ),
]
