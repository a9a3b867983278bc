"""The system-call filter of a sandbox: an allow-list, as a BPF program.

Calls that programs need are allowed. Administrative or rarely audited calls are refused with EPERM, as the
kernel itself would refuse them to a plain user. All others (newer than the table, `clone3`, `io_uring`, ...,
and `io_setup`, whose contexts are few for the whole host) fail with ENOSYS, so that programs fall back.
`clone` creates no namespaces, `socket` allows only UNIX and IP (network namespaces do not isolate AF_VSOCK),
and `fcntl` no locks of open file descriptions, indistinguishable from those of other sandboxes.

With root emulation, changes of owner and user *return* success (0) without an effect: package managers need
that, and everything belongs to one user anyway. The idea is Charliecloud's (Priedhorsky et al.,
"Zero-consistency root emulation", 2023).

Numbers: x86_64 and aarch64; only x86_64 has been run.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence

Range = tuple[int, int]
"""First and last system-call number."""

_ALLOWED: dict[str, tuple[Range, ...]] = {
    "x86_64": (
        (0, 100), (102, 102), (104, 132), (133, 133), (137, 138), (140, 152), (157, 158), (160, 160),
        (162, 162), (186, 205), (207, 211), (213, 213), (216, 235), (239, 245), (247, 247), (251, 255),
        (257, 271), (273, 278), (280, 297), (299, 299), (302, 302), (306, 307), (309, 309), (314, 319),
        (322, 322), (324, 334), (424, 424), (434, 434), (436, 437), (439, 439), (441, 441), (449, 449),
        (452, 452),
    ),
    "aarch64": (
        (1, 4), (5, 17), (19, 38), (43, 50), (52, 57), (59, 59), (61, 88), (90, 91), (93, 103), (107, 111),
        (113, 115), (118, 141), (143, 160), (163, 169), (172, 216), (220, 223), (226, 234), (236, 236),
        (242, 243), (260, 261), (263, 263), (267, 267), (269, 269), (274, 279), (281, 281), (283, 293),
        (424, 424), (434, 434), (436, 437), (439, 439), (441, 441), (449, 449), (452, 452),
    ),
}  # fmt: skip
_REFUSED: dict[str, dict[str, int]] = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "uselib": 134, "personality": 135, "ustat": 136, "sysfs": 139,
        "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
        "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174,
        "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212,
        "clock_settime": 227, "mbind": 237, "set_mempolicy": 238, "kexec_load": 246, "add_key": 248,
        "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272, "move_pages": 279,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58,
        "quotactl": 60, "acct": 89, "personality": 92, "kexec_load": 104, "init_module": 105,
        "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142,
        "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171, "add_key": 217,
        "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "mbind": 235, "set_mempolicy": 237,
        "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "unshare": 97, "fanotify_init": 262,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280,
        "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
_AS_ROOT: dict[str, tuple[Range, ...]] = {
    "x86_64": ((92, 94), (105, 106), (113, 114), (116, 117), (119, 119), (122, 123), (126, 126), (260, 260)),
    "aarch64": ((54, 55), (91, 91), (143, 147), (149, 149), (151, 152), (159, 159)),
}
"""chown, setuid and their like, capset: return success under root emulation."""
_CALLS = {
    "x86_64": {"clone": 56, "fcntl": 72, "socket": 41, "socketpair": 53, "setsockopt": 54},
    "aarch64": {"clone": 220, "fcntl": 25, "socket": 198, "socketpair": 199, "setsockopt": 208},
}
_ON_PROCESS = {
    "x86_64": {"sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "prlimit64": 302,
               "sched_setattr": 314},
    "aarch64": {"sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "prlimit64": 261,
                "sched_setattr": 274},
}  # fmt: skip
"""Calls that change the process in their first argument; refused for process 1, the sandbox's server."""
_ON_GROUP = {
    "x86_64": {"setpriority": (141, 2), "ioprio_set": (251, 3)},
    "aarch64": {"setpriority": (140, 2), "ioprio_set": (30, 3)},
}
"""(number, first argument for "all processes of the user"); the second argument is the process or group."""
_SHARED_MEMORY: dict[str, tuple[int, ...]] = {"x86_64": (29, 68, 240, 319), "aarch64": (180, 186, 194, 279)}
"""shmget, msgget, mq_open, memfd_create: memory that belongs to no process, invisible to the watchdog."""
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_FILE_LOCKS = (36, 37, 38)
"""F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW. Programs that probe with the first fall back to process locks."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
_PROTOCOLS = (0, 1, 6, 17)
"""Default of the socket type, UNIX (of IP: ICMP, which the namespace refuses), TCP, UDP."""
_SOCKET_LEVEL, _BUFFER_SIZES = 1, (7, 8)
"""SOL_SOCKET, and its options SO_SNDBUF and SO_RCVBUF."""
_PACKET_FILTERS = (26, 51)
"""SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF: the host has little memory for compiled filters."""

Instruction = tuple[int, int, int, int]
_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1, _ARGUMENT_2 = 0, 4, 16, 24, 32
_ABSENT: list[Instruction] = [(_RET, 0, 0, _ERRNO | errno.ENOSYS)]


def build_filter(
    machine: str, emulate_root: bool = False, shared_memory: bool = True, countable_sockets: bool = False
) -> bytes:
    """The BPF program for one machine type. Raises KeyError for a machine that is not in the tables.

    `shared_memory`: whether memory that belongs to no process is allowed; only control groups bound it.
    `countable_sockets`: allows only sockets that `socket_memory` can count: setting buffer sizes returns
    success without an effect, and packet filters are refused.
    """
    blocks = _blocks(machine, emulate_root, shared_memory, countable_sockets)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, _AUDIT[machine]),
        (_RET, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_search(blocks),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _blocks(
    machine: str, emulate_root: bool, shared_memory: bool, countable_sockets: bool
) -> list[tuple[int, list[Instruction]]]:
    """(first number, instructions for the numbers from there on), ascending, from 0."""
    done: dict[int, list[Instruction]] = {}
    for first, last in _ALLOWED[machine]:
        done.update({number: [(_RET, 0, 0, _ALLOW)] for number in range(first, last + 1)})
    for number in _REFUSED[machine].values():
        done[number] = [(_RET, 0, 0, _ERRNO | errno.EPERM)]
    for first, last in _AS_ROOT[machine] if emulate_root else ():
        done.update({number: [(_RET, 0, 0, _ERRNO)] for number in range(first, last + 1)})
    done[_CALLS[machine]["clone"]] = [
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_JSET, 0, 1, _NAMESPACE_FLAGS),
        (_RET, 0, 0, _ERRNO | errno.EPERM),
        (_RET, 0, 0, _ALLOW),
    ]
    done[_CALLS[machine]["fcntl"]] = [
        (_LOAD, 0, 0, _ARGUMENT_1),
        *((_JEQ, len(_FILE_LOCKS) - index, 0, command) for index, command in enumerate(_FILE_LOCKS)),
        (_RET, 0, 0, _ALLOW),
        (_RET, 0, 0, _ERRNO | errno.EINVAL),
    ]
    known = [(_LOAD, 0, 0, _ARGUMENT_2), *_one_of(_PROTOCOLS, errno.EPROTONOSUPPORT)]
    for name in ("socket", "socketpair"):
        done[_CALLS[machine][name]] = [
            (_LOAD, 0, 0, _ARGUMENT_0),
            *_one_of(_FAMILIES, errno.EAFNOSUPPORT),
            *(known if countable_sockets else []),
            (_RET, 0, 0, _ALLOW),
        ]
    if countable_sockets:
        done[_CALLS[machine]["setsockopt"]] = [
            (_LOAD, 0, 0, _ARGUMENT_1),
            (_JEQ, 0, 5, _SOCKET_LEVEL),
            (_LOAD, 0, 0, _ARGUMENT_2),
            (_JEQ, 4, 0, _PACKET_FILTERS[0]),
            (_JEQ, 3, 0, _PACKET_FILTERS[1]),
            (_JEQ, 3, 0, _BUFFER_SIZES[0]),
            (_JEQ, 2, 0, _BUFFER_SIZES[1]),
            (_RET, 0, 0, _ALLOW),
            (_RET, 0, 0, _ERRNO | errno.EPERM),
            (_RET, 0, 0, _ERRNO),
        ]
    for number in _ON_PROCESS[machine].values():
        done[number] = [
            (_LOAD, 0, 0, _ARGUMENT_0),
            (_JEQ, 0, 1, 1),
            (_RET, 0, 0, _ERRNO | errno.EPERM),
            (_RET, 0, 0, _ALLOW),
        ]
    for number, user in _ON_GROUP[machine].values():
        done[number] = [
            (_LOAD, 0, 0, _ARGUMENT_0),
            (_JEQ, 2, 0, user),
            (_LOAD, 0, 0, _ARGUMENT_1),
            (_JEQ, 0, 1, 1),
            (_RET, 0, 0, _ERRNO | errno.EPERM),
            (_RET, 0, 0, _ALLOW),
        ]
    for number in () if shared_memory else _SHARED_MEMORY[machine]:
        done[number] = _ABSENT
    blocks: list[tuple[int, list[Instruction]]] = []
    for number in range(max(done) + 2):
        body = done.get(number, _ABSENT)
        if not blocks or blocks[-1][1] != body:
            blocks.append((number, body))
    return blocks


def _one_of(values: Sequence[int], refusal: int) -> list[Instruction]:
    """Instructions that continue after themselves if the loaded value is one of these, and else refuse."""
    comparisons = [(_JEQ, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*comparisons, (_RET, 0, 0, _ERRNO | refusal)]


def _search(blocks: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """A binary search for the block of a number: about seven comparisons."""
    if len(blocks) == 1:
        return blocks[0][1]
    middle = len(blocks) // 2
    below, above = _search(blocks[:middle]), _search(blocks[middle:])
    if len(below) > 255:
        return [(_JGE, 0, 1, blocks[middle][0]), (0x05, 0, 0, len(below)), *below, *above]
    return [(_JGE, len(below), 0, blocks[middle][0]), *below, *above]
