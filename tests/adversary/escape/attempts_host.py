"""Attempts on the host's files, settings and devices."""

from __future__ import annotations

from tests.adversary.escape.model import Attempt

_USERNS = "user namespace"
_CAPS = "capabilities dropped"
_OWN_VIEW = "own view of programs"

HOST = [
    Attempt(
        "read a host file by its path",
        "pivot_root into a root of its own",
        ("show /var/tmp",),
        """
        say(open(FACTS["canary"]).read())
        """,
    ),
    Attempt(
        "write a host file by its path",
        "pivot_root into a root of its own",
        ("show /var/tmp",),
        """
        for name in ("dropped", "canary-2"):
            open(FACTS["canary_dir"] + "/" + name, "w").write("x")
        """,
    ),
    Attempt(
        "climb out of the root with ..",
        "pivot_root: there is nothing above the root",
        ("pivot_root", "allow chroot", _CAPS),
        """
        # The classic: keep a directory above the new root open, and walk up from there.
        above = os.open("/", os.O_RDONLY)
        os.makedirs("/tmp/inner", exist_ok=True)
        call("chroot", b"/tmp/inner")
        os.fchdir(above)
        for _ in range(30):
            os.chdir("..")
        call("chroot", b".")
        for place in ("files/templates", "files_ro/templates"):
            if os.path.isdir(place):
                for name in os.listdir(place):
                    path = f"{place}/{name}/secret.txt"
                    if os.path.exists(path):
                        escaped(open(path).read())
        raise OSError(errno.ENOENT, "no other root in sight")
        """,
        neighbour=True,
    ),
    Attempt(
        "read a host file through /proc/<pid>/root",
        "host processes have no number inside; another user namespace owns them",
        ("pid namespace", "outer pid namespace", _USERNS, _CAPS),
        """
        say(open(f"/proc/{FACTS['victim']}/root" + FACTS["canary"]).read())
        """,
    ),
    Attempt(
        "open a host file by its handle",
        "open_by_handle_at is refused, and needs the host's CAP_DAC_READ_SEARCH",
        ("allow open_by_handle_at", _USERNS, _CAPS, _OWN_VIEW),
        """
        if not FACTS["handle"]:
            impossible("the host's file system has no handles")
        handle = ctypes.create_string_buffer(bytes.fromhex(FACTS["handle"]))
        mount = os.open(FACTS["mount"], os.O_RDONLY)
        descriptor = call("open_by_handle_at", mount, handle, os.O_RDONLY)
        say(os.read(descriptor, 100).decode())
        """,
    ),
    Attempt(
        "open a host program for writing",
        "the programs are a read-only mount, and root's",
        ("read-only root", _USERNS, _OWN_VIEW),
        """
        for path in ("/usr/bin/env", "/usr/bin/true", "/bin/true"):
            if os.path.exists(path):
                os.close(os.open(path, os.O_WRONLY))
                escaped(path + " opened for writing")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "remount the programs writable",
        "mount is refused, needs CAP_SYS_ADMIN, and the user namespace locks the flag",
        ("allow mount", _CAPS, _USERNS, _OWN_VIEW),
        """
        call("mount", b"none", b"/usr", None, MS_REMOUNT | MS_BIND, None)
        if not os.statvfs("/usr").f_flag & os.ST_RDONLY:
            escaped("/usr is writable")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "gain rights by a set-user-id program",
        "nosuid mount, no_new_privs, and no other user in the user namespace",
        ("nosuid", "no_new_privs", "user namespace, as nobody", _OWN_VIEW),
        """
        import subprocess
        names = [f"/usr/bin/{n}" for n in ("su", "passwd", "newgrp", "mount", "umount", "gpasswd", "chsh")]
        names = [n for n in names if os.path.exists(n) and os.stat(n).st_mode & 0o4000]
        if not names:
            impossible("no set-user-id program here")
        pipe = subprocess.PIPE
        child = subprocess.Popen(names[0], stdin=pipe, stdout=pipe, stderr=pipe)
        for _ in range(40):
            while open(f"/proc/{child.pid}/comm").read().strip() != os.path.basename(names[0]):
                time.sleep(0.01)
            if child.poll() is not None:
                break
            row = next(line for line in open(f"/proc/{child.pid}/status") if line.startswith("Uid:"))
            real, effective = row.split()[1:3]
            if real != effective:
                child.stdin.close()
                escaped(row)
            time.sleep(0.01)
        child.kill()
        raise OSError(errno.EPERM, "ran as its caller")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "make a device node and open it",
        "mknod of devices needs the host's CAP_MKNOD, and the mounts are nodev",
        (_USERNS, _CAPS, "nodev"),
        """
        import stat
        os.mknod("/tmp/zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        if os.read(os.open("/tmp/zero", os.O_RDONLY), 1) == bytes(1):
            escaped("a device opened")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "open a host device",
        "/dev holds null, zero, full, random and urandom, and nothing else",
        ("show /dev",),
        """
        for name in ("ptmx", "tty", "fuse", "net/tun", "kvm", "kmsg", "mem", "loop-control", "vda"):
            try:
                os.close(os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY))
            except OSError:
                continue
            escaped("/dev/" + name)
        raise OSError(errno.ENOENT, "none of them")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "push characters into the host's terminal",
        "a session of its own without a terminal, and no terminal in /dev",
        (),
        """
        import fcntl, termios
        for descriptor in (0, 1, 2):
            try:
                fcntl.ioctl(descriptor, termios.TIOCSTI, b"#")
                escaped("TIOCSTI")
            except OSError:
                pass
        fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), termios.TIOCSTI, b"#")
        escaped("TIOCSTI on /dev/tty")
        """,
        no_control="the kernel refuses TIOCSTI by itself, or the fork server has no terminal to lend",
    ),
    Attempt(
        "write core_pattern",
        "the host's root is not mapped into the sandbox",
        (_USERNS,),
        """
        os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY))
        escaped("core_pattern opened for writing")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "trigger sysrq",
        "the host's root is not mapped into the sandbox",
        (_USERNS,),
        """
        if not os.path.exists("/proc/sysrq-trigger"):
            impossible("no sysrq")
        os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY))
        escaped("sysrq-trigger opened for writing")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "write any kernel setting",
        "the host's root is not mapped into the sandbox",
        (_USERNS,),
        """
        # ns_last_pid is open to all, and checks at the write.
        found = []
        for folder, _, names in os.walk("/proc/sys"):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    os.close(os.open(path, os.O_WRONLY))
                    found.append(path)
                except OSError:
                    pass
        found = [path for path in found if not path.endswith("ns_last_pid")]
        if found:
            escaped(f"{len(found)} settings, {found[0]} the first")
        raise OSError(errno.EACCES, "every setting")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "choose the next process id",
        "ns_last_pid needs a capability that was dropped",
        (_CAPS,),
        """
        path = "/proc/sys/kernel/ns_last_pid"
        if not os.path.exists(path):
            impossible("this kernel has no ns_last_pid")
        value = open(path, "rb").read().strip()
        os.write(os.open(path, os.O_WRONLY), value)
        escaped("ns_last_pid was written")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "read the kernel's log",
        "needs the host's CAP_SYSLOG",
        (_USERNS, _CAPS),
        """
        os.close(os.open("/proc/kmsg", os.O_RDONLY | os.O_NONBLOCK))
        escaped("/proc/kmsg opened")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "read the kernel's memory",
        "needs the host's CAP_SYS_RAWIO",
        (_USERNS, _CAPS),
        """
        if not os.path.exists("/proc/kcore"):
            impossible("no kcore")
        os.close(os.open("/proc/kcore", os.O_RDONLY))
        escaped("/proc/kcore opened")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "look at /sys",
        "/sys is not mounted",
        ("show /sys",),
        """
        if os.listdir("/sys/kernel"):
            escaped("/sys is there")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "leave a release agent in a control group",
        "no control group file system inside; its files are the host's root's",
        ("show /sys", _USERNS),
        """
        import glob
        names = glob.glob("/sys/fs/cgroup/*/release_agent") + glob.glob("/sys/fs/cgroup/release_agent")
        if not names and os.path.isdir("/sys/fs/cgroup"):
            names = glob.glob("/sys/fs/cgroup/cgroup.procs")
        if not names:
            raise OSError(errno.ENOENT, "no control groups in sight")
        os.close(os.open(names[0], os.O_WRONLY))
        escaped(names[0] + " opened for writing")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "mount its control group and raise its limits",
        "mount is refused and needs CAP_SYS_ADMIN; the files are the host's root's",
        ("allow mount", _CAPS, _USERNS),
        """
        os.makedirs("/tmp/group")
        for kind, options, file in (("cgroup", b"memory", "memory.limit_in_bytes"),
                                    ("cgroup2", None, "cgroup.procs")):
            try:
                call("mount", b"none", b"/tmp/group", kind.encode(), 0, options)
            except OSError as error:
                refusal = error
                continue
            os.close(os.open("/tmp/group/" + file, os.O_WRONLY))
            escaped(file + " opened for writing")
        raise refusal
        """,
        reach="shared kernel",
    ),
    Attempt(
        "learn where its control group lies on the host",
        "a control group namespace",
        ("cgroup namespace",),
        """
        rows = [line.strip().split(":", 2)[2] for line in open("/proc/self/cgroup")]
        outside = [path for path in rows if "etude" in path or ".." in path or len(path) > 1]
        if outside:
            escaped(outside[0])
        """,
        reach="shared kernel",
    ),
    Attempt(
        "read the host's /dev/shm",
        "/dev/shm is the sandbox's own disk",
        ("show /dev/shm",),
        """
        say(open(FACTS["shm_file"]).read())
        """,
    ),
    Attempt(
        "learn where the kernel lies in memory",
        "addresses in /proc/kallsyms need the host's CAP_SYSLOG",
        (_USERNS, _CAPS),
        """
        if not os.path.exists("/proc/kallsyms"):
            impossible("no kallsyms")
        rows = open("/proc/kallsyms").read(4000).splitlines()
        known = [row for row in rows if int(row.split()[0], 16)]
        if known:
            escaped(f"{len(known)} addresses")
        raise OSError(errno.EPERM, "every address is 0")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "learn physical addresses of its pages",
        "frame numbers in pagemap need the host's CAP_SYS_ADMIN",
        (_USERNS, _CAPS),
        """
        held = ctypes.create_string_buffer(b"x" * 8192)
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek((ctypes.addressof(held) + 4096) // 4096 * 8)
            entry = struct.unpack("Q", file.read(8))[0]
        if entry & ((1 << 55) - 1):
            escaped("a frame number")
        raise OSError(errno.EPERM, "frame numbers are 0")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "read the kernel's own allocations",
        "slabinfo and vmallocinfo are for the host's root",
        (_USERNS,),
        """
        refusal = OSError(errno.ENOENT, "neither is there")
        for name in ("/proc/slabinfo", "/proc/vmallocinfo"):
            if os.path.exists(name):
                try:
                    escaped(f"{len(open(name).read(500))} bytes of {name}")
                except OSError as error:
                    refusal = error
        raise refusal
        """,
        reach="shared kernel",
    ),
    Attempt(
        "reach a driver by its file in /proc",
        "files of drivers and interrupts are for the host's root",
        (_USERNS,),
        """
        found = []
        for folder in ("/proc/irq", "/proc/bus", "/proc/acpi", "/proc/fs", "/proc/scsi", "/proc/driver"):
            for place, _, names in os.walk(folder):
                for name in names:
                    try:
                        os.close(os.open(os.path.join(place, name), os.O_WRONLY))
                        found.append(os.path.join(place, name))
                    except OSError:
                        pass
        if found:
            escaped(f"{len(found)} files, {found[0]} the first")
        raise OSError(errno.EACCES, "every file")
        """,
        reach="shared kernel",
    ),
]
