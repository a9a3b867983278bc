"""Namespaces and mounts: the root shared by all sandboxes, and how a process enters a sandbox.

The fork server lives in a mount namespace of its own, whose root is a small tmpfs:

    /root        the `/` of sandboxes without an image: the host's programs, read-only
    /image_root  empty; mount point for the root of a sandbox with an image
    /images      layers of images, from the layer store (if there is one)
    /files       templates/<digest> and layers/<id>, writable here only
    /files_ro    the same, read-only: lower layers of the sandboxes
    /nothing     empty: a lower layer beneath the host's directories
    /scratch     empty; mount point for the size-limited tmpfs of each sandbox
    /in_place    a writable directory of the host that is the workspace of all sandboxes (if there is one)
    /proc        of the fork server's pid namespace

A sandbox is cloned into new user, mount, pid, network, IPC and UTS namespaces, mounts its own tmpfs,
overlays and /proc, and pivots into its root: the other directories above are then unreachable. Its cgroup
namespace is created when the plan arrives: it begins in the groups that the process is in by then. Last, it
moves into a user namespace with a single user (see `ids`).

    no image    /            the fork server's /root, read-only; /tests, /logs and /solution link to /tmp
                /workspace   overlay: scratch over saved layers over the template; or the host's directory,
                             which is mounted at its own path as well
    an image    /            overlay: scratch over saved layers over the template over the image's layers
    both        /tmp         scratch, or an overlay of scratch over saved layers
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etude.sandbox.inside import ids, kernel, layers
from etude.sandbox.inside.gathering import LayeredRoot
from etude.sandbox.inside.kernel import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_REC
from etude.sandbox.inside.rights import enter_own_namespaces
from etude.sandbox.inside.seccomp import build_filter

SANDBOX_UID = 1000
PENDING_SIGNALS = 512
_SIGNAL_SHARES = 256
"""A limit of the user is shared by its sandboxes: this many of them may use their full share."""
SERVER_FILES = 8192
WATCHES = {"max_inotify_instances": 16, "max_inotify_watches": 16384}
"""Limits per sandbox: the host counts these for the user who created the namespaces."""
_WATCH_SHARES = 16
"""Number of sandboxes that may reach these limits at the same time."""
FILES, FILES_RO, IMAGES, IN_PLACE = "/files", "/files_ro", "/images", "/in_place"
HOST_DIRECTORIES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC_DIRECTORIES = ("etc/alternatives", "etc/ssl/certs")  # the second: trusted TLS certificates
ROOT_ENVIRONMENT = {"APT_CONFIG": "/dev/etude/apt.conf"}
"""For commands of an emulated root: apt must not change to another user, as there is none."""
PYTHON = "/dev/etude/python"
"""In sandboxes with an image, the standard library of the interpreter that runs their tests."""
_GIT = {
    "gitconfig": "[safe]\n\tdirectory = *\n[core]\n\texcludesFile = /etc/gitignore\n",
    "gitignore": ".etude/\n",
}
"""Files of /etc: git must accept a project's history of another user than the sandbox's."""
_APT_CONFIG = 'APT::Sandbox::User "root";\n'
_DEVICES = ("null", "zero", "full", "random", "urandom")
ETC = {
    "passwd": f"root:x:0:0::/:/bin/sh\nagent:x:{SANDBOX_UID}:{SANDBOX_UID}::/workspace:/bin/sh\n",
    "group": f"root:x:0:\nagent:x:{SANDBOX_UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_bound: list[str] = []
"""Directories of the host that are mounted in the root; filled when it is built."""
_SANDBOX_FLAGS = kernel.NEWUSER | kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS


@dataclass(frozen=True)
class Plan:
    """The composition of one sandbox's file system. Layer names are directories of the fork server."""

    digest: str
    """Digest of the template."""
    disk_bytes: int
    layers: tuple[str, ...] = ()
    """Saved layers, uppermost first."""
    has_image: bool = False
    """Whether the whole root is an image; an image without layers is an empty root, not the host's."""
    images: tuple[str, ...] = ()
    """Layers of the image, uppermost first."""
    workspace: str = "/workspace"
    user: str = "agent"
    in_place: bool = False
    """Whether the workspace is a directory of the host, at its own path."""
    passed_over: tuple[str, ...] = ()
    """Names that listings and searches skip."""

    @property
    def template(self) -> str:
        return f"{FILES_RO}/templates/{self.digest}"

    def lower_layers(self) -> list[str]:
        """Lower layers of the workspace, or of the whole root where there is an image."""
        saved = [f"{FILES_RO}/layers/{layer}/{layers.ROOT}" for layer in self.layers]
        return [*saved, self.template, *(f"{IMAGES}/{layer}" for layer in self.images)]

    def tmp_lower_layers(self) -> list[str]:
        """Lower layers of /tmp."""
        return [f"{FILES_RO}/layers/{layer}/{layers.TEMPORARY}" for layer in self.layers]


def isolate_fork_server(
    prefix: str, images: str, view: Mapping[str, Any], map_ids: Callable[[int, int], None]
) -> None:
    """Moves this process into a new user, mount and (for its next child) pid namespace.

    `prefix` is the interpreter's installation, visible in sandboxes; `images` the layer store's directory, or
    empty; `view` what else they see of the host (`local.host_view`), or empty; `map_ids` maps the ids of the
    host.
    """
    if os.geteuid() == 0:
        _lift_shared_limit()
    enter_own_namespaces(lambda: _build_root(prefix, images, view), map_ids)
    kernel.unshare(kernel.NEWPID)


def _lift_shared_limit() -> None:
    """Lifts the user's limit of pending signals: each sandbox has its own, and could else starve others.

    The kernel compares the sum of all sandboxes with the limit of the user who creates their user namespaces.
    """
    with contextlib.suppress(ValueError):
        # Root may not raise limits here: each sandbox gets a share (see `_pending_signals`).
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _pending_signals() -> int:
    """Limit of pending signals of one sandbox; timers take one each."""
    most = resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]
    if most == resource.RLIM_INFINITY:
        return PENDING_SIGNALS
    return min(PENDING_SIGNALS, most, max(64, most // _SIGNAL_SHARES))


def mount_fork_server() -> None:
    """Mounts what belongs to the fork server's own namespaces; runs as pid 1."""
    kernel.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    kernel.mount("files", FILES, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    for name in ("templates", "layers"):
        os.mkdir(f"{FILES}/{name}")
    kernel.mount(FILES, FILES_RO, flags=MS_BIND)
    kernel.make_read_only(FILES_RO)
    for name, most in WATCHES.items():
        with open(f"/proc/sys/fs/inotify/{name.replace('inotify', 'user')}") as file:
            WATCHES[name] = max(1, min(most, int(file.read()) // _WATCH_SHARES))


def _build_root(prefix: str, images: str, view: Mapping[str, Any]) -> None:
    kernel.mount("", "/", flags=MS_PRIVATE | MS_REC)
    kernel.mount("fork-server", "/tmp", "tmpfs", MS_NOSUID, "mode=755")
    os.mkdir("/tmp/host")
    os.chdir("/tmp")
    kernel.pivot_into(".", "host")
    for name in ("/root", "/image_root", IMAGES, FILES, FILES_RO, "/scratch", "/proc", "/nothing"):
        os.mkdir(name)
    if images:
        kernel.mount(f"/host{images}", IMAGES, flags=MS_BIND)
        kernel.make_read_only(IMAGES)
    kernel.mount("sandbox", "/root", "tmpfs", MS_NOSUID, "mode=755,size=4m")
    for name in HOST_DIRECTORIES:
        _bind_host(name)
    if not f"{prefix}/".startswith("/usr/"):
        _bind_host(prefix.lstrip("/"))
    git = {**_GIT, "gitconfig": _GIT["gitconfig"] + view["git"]} if view else {}
    _fill_etc({**ETC, **git})
    _fill_dev(prefix)
    if view:
        _bind_view(view["directories"], view["links"])
    for name in ("proc", "tmp", "workspace"):
        os.mkdir(f"/root/{name}")
    for name in ("tests", "logs", "solution"):
        # Directories of the scripts that grade a task (see `environment.scripts`).
        os.symlink(f"/tmp/{name}", f"/root/{name}")
    # A new /proc may only be mounted where a complete one is visible: this one, until it is covered.
    kernel.mount("/host/proc", "/proc", flags=MS_BIND | MS_REC)
    if view and view["in_place"]:
        _mount_in_place(view["in_place"])
    kernel.make_read_only("/root")
    kernel.detach("/host")


def _bind_host(name: str) -> None:
    """Bind-mounts a host directory (or copies the link in its place) into the sandbox root."""
    source, target = f"/host/{name}", f"/root/{name}"
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.makedirs(target)
        kernel.mount(source, target, flags=MS_BIND | MS_REC)
        _bound.append(name)


def _bind_view(directories: Mapping[str, str], links: Mapping[str, str]) -> None:
    """Creates links, and bind-mounts directories of the host, none of them below one that is mounted already.

    The links come first: created later, one below such a directory would be written to the host.
    """
    for path, target in links.items():
        os.makedirs(os.path.dirname(f"/root{path}"), exist_ok=True)
        os.symlink(target, f"/root{path}")
    for path, source in directories.items():
        os.makedirs(f"/root{path}", exist_ok=True)
        kernel.mount(f"/host{source}", f"/root{path}", flags=MS_BIND | MS_REC)
        _bound.append(path[1:])


def _mount_in_place(path: str) -> None:
    """Mounts a directory of the host and creates its mount point; below /tmp each sandbox does the latter."""
    if not path.startswith("/tmp/"):
        os.makedirs(f"/root{path}", exist_ok=True)
    os.mkdir(IN_PLACE)
    if os.geteuid() != 0:
        kernel.mount(f"/host{path}", IN_PLACE, flags=MS_BIND | MS_REC)
        return
    try:
        ids.mount_as_own(f"/host{path}", IN_PLACE)
    except OSError as error:
        why = f"root cannot lend {path} to the user of a sandbox on this file system: work as its owner"
        raise OSError(error.errno, f"{why} ({error.strerror})") from error


def _fill_etc(files: Mapping[str, str]) -> None:
    os.mkdir("/root/etc")
    for name, text in files.items():
        with open(f"/root/etc/{name}", "w") as file:
            file.write(text)
    if os.path.isfile("/host/etc/ld.so.cache"):
        with open("/host/etc/ld.so.cache", "rb") as source, open("/root/etc/ld.so.cache", "wb") as target:
            target.write(source.read())
    os.mkdir("/root/etc/ssl")
    for name in ETC_DIRECTORIES:
        _bind_host(name)


def _fill_dev(prefix: str) -> None:
    library = f"python{sys.version_info.major}.{sys.version_info.minor}"
    os.mkdir("/root/dev")
    os.mkdir("/root/dev/shm")
    os.mkdir("/root/dev/etude")
    with open("/root/dev/etude/apt.conf", "w") as file:
        file.write(_APT_CONFIG)
    os.makedirs(f"/root{PYTHON}/lib/{library}")
    kernel.mount(f"/host{prefix}/lib/{library}", f"/root{PYTHON}/lib/{library}", flags=MS_BIND)
    _bound.append(f"{PYTHON[1:]}/lib/{library}")
    for name in _DEVICES:
        with open(f"/root/dev/{name}", "w"):
            pass
        kernel.mount(f"/host/dev/{name}", f"/root/dev/{name}", flags=MS_BIND)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/root/dev/{name}")


def clone_sandbox() -> int:
    """Clones this process into new namespaces of a sandbox: 0 in the child, which is pid 1 there."""
    return kernel.clone(_SANDBOX_FLAGS)


def enter_sandbox(plan: Plan, mounts: list[int]) -> tuple[int, int, int, LayeredRoot | None]:
    """Sets up the file system of a newly cloned pid 1. `mounts`: see `ids.Users.assign_ids`.

    Returns the uid inside; descriptors, usable after the pivot, of the initial workspace and of the sandbox's
    own disk; and the initial root of an image. Raises OSError, or KeyError for a user that the image lacks.
    """
    uid = _user_id(plan)
    kernel.unshare(kernel.NEWCGROUP)
    ids.become_own_user(
        dict(zip((FILES_RO, IMAGES), mounts, strict=False)), IMAGES if plan.has_image else FILES_RO
    )
    inodes = max(1024, plan.disk_bytes >> 12)
    options = f"size={plan.disk_bytes},nr_inodes={inodes},mode=755"
    kernel.mount("scratch", "/scratch", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name in (layers.ROOT, "work", layers.TEMPORARY, "tmp_work", "shm"):
        os.mkdir(f"/scratch/{name}")
    os.chmod(f"/scratch/{layers.TEMPORARY}", 0o1777)
    scratch = os.open("/scratch", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if plan.has_image:
        root = _mount_image(plan)
    else:
        # A bind mount, because a mount inherited from the fork server is locked and cannot become root.
        root = "/root"
        kernel.mount(root, root, flags=MS_BIND | MS_REC)
        if not plan.in_place:
            _overlay("/root/workspace", plan.lower_layers(), layers.ROOT, "work")
    _cover_programs(root, [name for name in _bound if not plan.has_image or name.startswith("dev/")])
    if plan.layers:
        _overlay(f"{root}/tmp", plan.tmp_lower_layers(), layers.TEMPORARY, "tmp_work")
    else:
        kernel.mount(f"/scratch/{layers.TEMPORARY}", f"{root}/tmp", flags=MS_BIND)
    for place in {"/workspace", plan.workspace} if plan.in_place else ():
        os.makedirs(f"{root}{place}", exist_ok=True)
        kernel.mount(IN_PLACE, f"{root}{place}", flags=MS_BIND | MS_REC)
    kernel.mount("/scratch/shm", f"{root}/dev/shm", flags=MS_BIND)
    kernel.mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name, limit in WATCHES.items():
        kernel.write_file(f"{root}/proc/sys/user/{name}", str(limit))
    base, before = _open_base(plan, scratch)
    os.chdir(root)
    kernel.pivot_root_here()
    os.chdir(plan.workspace)
    socket.sethostname("sandbox")
    kernel.raise_loopback()
    return uid, base, scratch, before


def _cover_programs(root: str, names: list[str]) -> None:
    """Gives a sandbox its own inodes of the host's files, by an overlay over each directory.

    Through shared inodes a sandbox would see every use by another (inotify), and could lock files for all.
    They stay shared where the overlay fails: on a host whose root is a second overlay already, since a third
    is not allowed, and where something is mounted below a directory, which an overlay would not show.
    """
    for name in names:
        options = f"lowerdir={root}/{name}:/nothing,userxattr"
        with contextlib.suppress(OSError):
            kernel.mount("programs", f"{root}/{name}", "overlay", MS_NOSUID | MS_NODEV, options)


def _mount_image(plan: Plan) -> str:
    root = "/image_root"
    _overlay(root, plan.lower_layers(), layers.ROOT, "work")
    for name in ("dev", "proc", "tmp"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    os.makedirs(root + plan.workspace, exist_ok=True)
    kernel.mount("/root/dev", f"{root}/dev", flags=MS_BIND | MS_REC)
    return root


def _overlay(target: str, lowers: list[str], upper: str, work: str) -> None:
    options = f"lowerdir={':'.join(lowers)},upperdir=/scratch/{upper},workdir=/scratch/{work},userxattr"
    kernel.mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, options)


def _open_base(plan: Plan, scratch: int) -> tuple[int, LayeredRoot | None]:
    """A descriptor of the template's workspace, and the initial root if the template has an image."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if not plan.has_image:
        return os.open(plan.template, flags), None
    base = plan.template
    if plan.images:
        base = "/scratch/base"
        os.mkdir(base)
        lowers = [plan.template, *(f"{IMAGES}/{layer}" for layer in plan.images)]
        kernel.mount("base", base, "overlay", kernel.MS_RDONLY, f"lowerdir={':'.join(lowers)},userxattr")
    os.makedirs(f"/scratch/empty{plan.workspace}", exist_ok=True)
    found = base + plan.workspace
    workspace = os.open(found if os.path.isdir(found) else "/scratch/empty", flags)
    written = [os.open(layers.ROOT, flags, dir_fd=scratch)]
    written += [os.open(f"{FILES_RO}/layers/{layer}/{layers.ROOT}", flags) for layer in plan.layers]
    return workspace, LayeredRoot(os.open(base, flags), written)


def _user_id(plan: Plan) -> int:
    """Uid of the plan's user, by /etc/passwd of the uppermost layer that has one."""
    if not plan.has_image:
        return SANDBOX_UID
    if plan.user in ("", "root", "0"):
        return 0
    name = plan.user.partition(":")[0]
    if name.isdigit():
        return int(name)
    for layer in plan.lower_layers():
        try:
            with open(f"{layer}/etc/passwd") as file:
                rows = [line.split(":") for line in file]
        except OSError:
            continue
        return {row[0]: int(row[2]) for row in rows if len(row) > 2}[name]
    raise KeyError(name)


def lock_down(uid: int, num_processes: int, file_bytes: int, emulate_root: bool, shared_memory: bool) -> None:
    """Drops every right that a sandbox does not need, for pid 1 and all its descendants.

    `uid`: its user inside.
    """
    kernel.unshare(kernel.NEWUSER)
    kernel.write_maps(uid, os.getuid(), os.getgid())
    for kind, limit in (
        (resource.RLIMIT_NPROC, num_processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _pending_signals()),
    ):
        resource.setrlimit(kind, (limit, limit))
    # Descriptors in flight are counted for the host's user and compared with the sender's limit: with the
    # limit of its children, pid 1 could be kept from lending its disk.
    most = min(SERVER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kernel.set_dumpable(False)
    kernel.drop_capabilities()
    kernel.install_filter(_FILTERS[emulate_root, shared_memory, True])


_FILTERS = {
    (emulate_root, shared_memory, True): build_filter(kernel.MACHINE, emulate_root, shared_memory, True)
    for emulate_root in (False, True)
    for shared_memory in (False, True)
}
