"""Numbers of the system calls that the attempts make. Standard library only: fork servers load it."""

from __future__ import annotations

NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "acct": 163, "add_key": 248, "adjtimex": 159, "bpf": 321, "capset": 126, "chroot": 161,
        "clock_adjtime": 305, "clone": 56, "clone3": 435, "fanotify_init": 300, "finit_module": 313,
        "fsopen": 430, "io_setup": 206, "io_uring_setup": 425, "ioperm": 173, "ioprio_set": 251, "kcmp": 312,
        "kexec_load": 246, "keyctl": 250, "memfd_create": 319, "mknodat": 259, "modify_ldt": 154,
        "mount": 165, "mq_open": 240, "msgget": 68, "open_by_handle_at": 304, "perf_event_open": 298,
        "personality": 135, "pidfd_getfd": 438, "pidfd_open": 434, "pidfd_send_signal": 424,
        "prlimit64": 302, "process_vm_readv": 310, "ptrace": 101, "reboot": 169, "sched_setscheduler": 144,
        "sethostname": 170, "setns": 308, "setpriority": 141, "setsockopt": 54, "shmget": 29, "socket": 41,
        "swapon": 167, "syslog": 103, "timerfd_create": 283, "umount2": 166, "unshare": 272,
        "userfaultfd": 323, "vhangup": 153,
    },
    "aarch64": {
        "acct": 89, "add_key": 217, "adjtimex": 171, "bpf": 280, "capset": 91, "chroot": 51,
        "clock_adjtime": 266, "clone": 220, "clone3": 435, "fanotify_init": 262, "finit_module": 273,
        "fsopen": 430, "io_setup": 0, "io_uring_setup": 425, "ioprio_set": 30, "kcmp": 272, "kexec_load": 104,
        "keyctl": 219, "memfd_create": 279, "mknodat": 33, "mount": 40, "mq_open": 180, "msgget": 186,
        "open_by_handle_at": 265, "perf_event_open": 241, "personality": 92, "pidfd_getfd": 438,
        "pidfd_open": 434, "pidfd_send_signal": 424, "prlimit64": 261, "process_vm_readv": 270,
        "ptrace": 117, "reboot": 142, "sched_setscheduler": 119, "sethostname": 161, "setns": 268,
        "setpriority": 140, "setsockopt": 208, "shmget": 194, "socket": 198, "swapon": 224, "syslog": 116,
        "timerfd_create": 85, "umount2": 39, "unshare": 97, "userfaultfd": 282, "vhangup": 58,
    },
}  # fmt: skip
"""machine -> call -> number."""
