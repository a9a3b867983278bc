"""Attempts on the kernel's rarely audited and administrative parts, and on namespaces."""

from __future__ import annotations

from tests.adversary.escape.model import Attempt

_USERNS = "user namespace"
_CAPS = "capabilities dropped"


def _surface(name: str, protects: str, lifts: tuple[str, ...], program: str) -> Attempt:
    return Attempt(name, protects, lifts, program, reach="shared kernel")


KERNEL = [
    _surface(
        "mount a file system",
        "mount is refused, and needs CAP_SYS_ADMIN",
        ("allow mount", _CAPS),
        """
        os.makedirs("/tmp/here")
        call("mount", b"x", b"/tmp/here", b"tmpfs", 0, None)
        escaped("a tmpfs is mounted")
        """,
    ),
    _surface(
        "mount by the newer calls",
        "fsopen does not exist, and needs CAP_SYS_ADMIN",
        ("allow fsopen", _CAPS),
        """
        call("fsopen", b"tmpfs", 0)
        escaped("fsopen")
        """,
    ),
    _surface(
        "unmount /proc and look beneath",
        "umount2 is refused, and needs CAP_SYS_ADMIN",
        ("allow umount2", _CAPS),
        """
        call("umount2", b"/proc", 2)
        escaped("/proc is gone")
        """,
    ),
    _surface(
        "make a user namespace with unshare",
        "unshare is refused",
        ("allow unshare",),
        """
        call("unshare", 0x10000000)
        escaped("a user namespace of its own")
        """,
    ),
    _surface(
        "make a user namespace with clone",
        "clone makes no namespaces",
        ("allow clone",),
        """
        pid = call("clone", 0x10000000 | 17, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        escaped("a user namespace of its own")
        """,
    ),
    _surface(
        "make a user namespace with clone3",
        "clone3 does not exist",
        ("allow clone3",),
        """
        arguments = struct.pack("QQQQQQQQ", 0x10000000, 0, 0, 0, 17, 0, 0, 0)
        pid = call("clone3", arguments, len(arguments))
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        escaped("a user namespace of its own")
        """,
    ),
    _surface(
        "mount in a user namespace of its own",
        "unshare and mount are refused",
        ("allow unshare", "allow mount"),
        """
        os.makedirs("/tmp/here")
        call("unshare", 0x10000000 | 0x20000)
        call("mount", b"x", b"/tmp/here", b"tmpfs", 0, None)
        escaped("a tmpfs is mounted")
        """,
    ),
    _surface(
        "enter a namespace of a host process",
        "host processes have no number inside; setns is refused; another user namespace owns them",
        ("pid namespace", "outer pid namespace", "allow setns", _USERNS, _CAPS),
        """
        descriptor = os.open(f"/proc/{FACTS['victim']}/ns/uts", os.O_RDONLY)
        call("setns", descriptor, 0)
        if os.readlink("/proc/self/ns/uts") == FACTS["namespaces"]["uts"]:
            escaped("in the host's namespace")
        """,
    ),
    _surface(
        "load a BPF program",
        "bpf is refused; the kernel wants the host's CAP_BPF",
        ("allow bpf", _USERNS, _CAPS),
        """
        array = struct.pack("IIIII", 2, 4, 8, 1, 0) + bytes(100)
        call("bpf", 0, array, len(array))
        escaped("a BPF map")
        """,
    ),
    _surface(
        "use io_uring",
        "io_uring does not exist, and its memory would have to be locked",
        ("allow io_uring_setup", "limit MEMLOCK"),
        """
        if os.path.exists("/proc/sys/kernel/io_uring_disabled"):
            if open("/proc/sys/kernel/io_uring_disabled").read().strip() == "2":
                impossible("io_uring is switched off on this host")
        parameters = ctypes.create_string_buffer(120)
        call("io_uring_setup", 1, parameters)
        escaped("a ring")
        """,
    ),
    _surface(
        "use userfaultfd",
        "userfaultfd is refused",
        ("allow userfaultfd",),
        """
        try:
            call("userfaultfd", 1)
        except OSError as error:
            if error.errno == errno.ENOSYS:
                impossible("this kernel has no userfaultfd")
            raise
        escaped("userfaultfd")
        """,
    ),
    _surface(
        "watch performance counters",
        "perf_event_open is refused",
        ("allow perf_event_open",),
        """
        if int(open("/proc/sys/kernel/perf_event_paranoid").read()) > 2:
            impossible("perf events are switched off for plain users on this host")
        attributes = bytearray(128)
        struct.pack_into("IIQ", attributes, 0, 1, 128, 0)
        struct.pack_into("Q", attributes, 40, 1 << 5 | 1 << 6)
        call("perf_event_open", bytes(attributes), 0, -1, -1, 0)
        escaped("a counter")
        """,
    ),
    _surface(
        "keep a key in the kernel's keyring",
        "add_key is refused",
        ("allow add_key",),
        """
        call("add_key", b"user", b"etude", b"x", 1, -2)
        escaped("a key")
        """,
    ),
    _surface(
        "reach the user's keyring",
        "keyctl is refused",
        ("allow keyctl",),
        """
        call("keyctl", 0, -4, 1)
        escaped("the user's keyring")
        """,
    ),
    _surface(
        "watch every file with fanotify",
        "fanotify_init is refused",
        ("allow fanotify_init",),
        """
        call("fanotify_init", 0x200, 0)
        escaped("fanotify")
        """,
    ),
    _surface(
        "ask for the size of the kernel's log",
        "syslog is refused; the kernel wants the host's CAP_SYSLOG",
        ("allow syslog", _USERNS, _CAPS),
        """
        call("syslog", 9, None, 0)
        escaped("syslog")
        """,
    ),
    _surface(
        "change the clock",
        "adjtimex is refused; the kernel wants the host's CAP_SYS_TIME",
        ("allow adjtimex", _USERNS, _CAPS),
        """
        # Writes back the estimated error that was read: needs the right, and moves no clock.
        state = ctypes.create_string_buffer(256)
        call("adjtimex", state)
        struct.pack_into("I", state, 0, 0x0008)
        call("adjtimex", state)
        escaped("adjtimex with a mode")
        """,
    ),
    _surface(
        "change the clock by its newer call",
        "clock_adjtime is refused; the kernel wants the host's CAP_SYS_TIME",
        ("allow clock_adjtime", _USERNS, _CAPS),
        """
        # As above.
        state = ctypes.create_string_buffer(256)
        call("clock_adjtime", 0, state)
        struct.pack_into("I", state, 0, 0x0008)
        call("clock_adjtime", 0, state)
        escaped("clock_adjtime with a mode")
        """,
    ),
    _surface(
        "rename the host",
        "sethostname is refused, needs CAP_SYS_ADMIN there, and a UTS namespace of its own",
        ("allow sethostname", _USERNS, _CAPS, "uts namespace"),
        """
        # To the name that it has: no change.
        name = os.uname().nodename.encode()
        call("sethostname", name, len(name))
        if os.readlink("/proc/self/ns/uts") == FACTS["namespaces"]["uts"]:
            escaped("sethostname")
        raise OSError(errno.EPERM, "only its own")
        """,
    ),
    _surface(
        "restart the machine",
        "reboot is refused, and needs CAP_SYS_BOOT",
        ("allow reboot", _CAPS),
        """
        # With wrong magic numbers: EINVAL says that the right to it was there.
        try:
            call("reboot", 1, 2, 3, None)
        except OSError as error:
            if error.errno == errno.EINVAL:
                escaped("reboot would be permitted")
            raise
        """,
    ),
    _surface(
        "load a kernel module",
        "finit_module is refused; the kernel wants the host's CAP_SYS_MODULE",
        ("allow finit_module", _USERNS, _CAPS),
        """
        # Of no file: EBADF says that the right to it was there.
        try:
            call("finit_module", -1, b"", 0)
        except OSError as error:
            if error.errno == errno.ENOSYS and "finit_module" in NUMBERS:
                if not os.path.exists("/proc/modules"):
                    impossible("this kernel has no modules")
            if error.errno == errno.EBADF:
                escaped("finit_module would be permitted")
            raise
        """,
    ),
    _surface(
        "load another kernel",
        "kexec_load is refused; the kernel wants the host's CAP_SYS_BOOT",
        ("allow kexec_load", _USERNS, _CAPS),
        """
        # Too many segments: EINVAL says that the right to it was there.
        try:
            call("kexec_load", 0, 1000, None, 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                escaped("kexec_load would be permitted")
            if error.errno == errno.ENOSYS:
                impossible("this kernel has no kexec")
            raise
        """,
    ),
    _surface(
        "add swap space",
        "swapon is refused; the kernel wants the host's CAP_SYS_ADMIN",
        ("allow swapon", _USERNS, _CAPS),
        """
        # Of a file that is not there.
        try:
            call("swapon", b"/nonexistent", 0)
        except OSError as error:
            if error.errno == errno.ENOENT:
                escaped("swapon would be permitted")
            if error.errno == errno.ENOSYS:
                impossible("this kernel has no swap")
            raise
        """,
    ),
    _surface(
        "get round the filter by 32-bit calls",
        "the filter kills what calls by another machine's numbers",
        ("filter's machine check",),
        """
        if platform.machine() != "x86_64":
            impossible("x86_64 only")
        # mov eax, 20 (getpid of i386); int 0x80; ret
        import mmap, signal
        code = mmap.mmap(-1, 4096, prot=7)
        code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")
        function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
        pid = os.fork()
        if pid == 0:
            os._exit(0 if function() == os.getpid() else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            escaped("getpid of another machine")
        if status == -signal.SIGSEGV:
            impossible("this kernel has no 32-bit calls")
        raise OSError(errno.EPERM, f"ended with {status}")
        """,
    ),
    _surface(
        "write the processor's descriptor table",
        "modify_ldt is refused",
        ("allow modify_ldt",),
        """
        buffer = ctypes.create_string_buffer(64)
        try:
            call("modify_ldt", 0, buffer, 64)
        except OSError as error:
            if error.errno == errno.ENOSYS:
                impossible("this kernel has no modify_ldt")
            raise
        escaped("modify_ldt")
        """,
    ),
    _surface(
        "switch off address randomisation",
        "personality is refused",
        ("allow personality",),
        """
        call("personality", 0x0040000)
        escaped("personality")
        """,
    ),
]
