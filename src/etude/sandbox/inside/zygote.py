"""The fork server: a small interpreter from which every sandbox of a backend is cloned.

It waits on two descriptors: the owner's control socket (one JSON packet per request, with descriptors) and
the owner's pidfd. It exits when either ends; as it is pid 1 of the pid namespace around all sandboxes, all
its descendants end with it. Requests, with their descriptors on the right:

    clone    id, announces: clones a first process that waits for its user, then for its plan
             `announces`: it sends `waiting` in between, from which the owner learns its process id
                                                               the sandbox's socket
    begin    id, plan, limits, env, emulate_root, has_groups, new_template: makes it a sandbox
                                                               a memfd for a new template
    kill     id
    forget   kind ("templates" or "layers"), name
    copy     layer: saves a sandbox's files as a layer         a socket for the answer, the sandbox's disk
    pack     layer, part ("root" or "tmp"): as a tar file      a socket for the answer, the file
    unpack   layer, part                                       a socket for the answer, the file
    merge    layer, below (uppermost first): merges layers into one      a socket for the answer
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from etude.sandbox.inside import faults, ids, kernel, layers, namespaces, packing
from etude.sandbox.inside.frames import MAX_REQUEST_BYTES, Unpacker, pack
from etude.sandbox.inside.isolation import Folders, Isolation, Namespaces, discard
from etude.sandbox.inside.jobs import WARM_MODULES
from etude.sandbox.inside.processes import reap
from etude.sandbox.inside.running import Settings
from etude.sandbox.inside.server import Server

MAX_DESCRIPTORS = 2


class ForkServer:
    """Clones sandboxes on request until the owner is gone."""

    def __init__(self, control: socket.socket, owner: int, isolation: Isolation, path: str) -> None:
        self._control = control
        self._owner = owner
        self._isolation = isolation
        self._path = path
        self._pids: dict[int, int] = {}
        self._ids: dict[int, int] = {}
        self._lines: dict[int, socket.socket] = {}
        """Sandbox id -> socket to a first process that waits for its plan."""
        self._workers: dict[int, str] = {}
        """Process id of a worker -> the layer it works on."""
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)

    def serve(self) -> None:
        """Returns when the owner has closed its end or has died."""
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._owner, self._wake_reader):
            poll.register(descriptor, select.POLLIN)
        self._control.send(json.dumps({"ready": os.getpid()}).encode())
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake_reader in ready:
                os.read(self._wake_reader, 4096)
                self._on_ended(reap()[0])
            if self._owner in ready:
                return
            if self._control.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
                for descriptor in descriptors:
                    # Received descriptors are inheritable by default.
                    os.set_inheritable(descriptor, False)
                if not data:
                    return
                try:
                    self._handle(data, descriptors)
                except Exception:
                    # Other sandboxes are not affected; the one of this request ends with its line.
                    traceback.print_exc()

    def _handle(self, data: bytes, descriptors: list[int]) -> None:
        request = json.loads(data)
        operation = request["op"]
        if operation == "clone":
            self._clone(request, descriptors[0])
        elif operation == "begin":
            self._begin(request, data, descriptors)
        elif operation == "kill":
            pid = self._pids.get(request["id"])
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        elif operation == "forget":
            self._forget(request["kind"], request["name"])
        else:
            self._start_layer_worker(request, descriptors)

    def _on_ended(self, pids: Iterable[int]) -> None:
        for pid in pids:
            number = self._ids.pop(pid, -1)
            if self._pids.pop(number, None) is not None:
                self._isolation.on_ended(pid)
            line = self._lines.pop(number, None)
            if line is not None:
                line.close()
            self._workers.pop(pid, None)

    def _forget(self, kind: str, name: str) -> None:
        """Removes a template or a layer, and kills the workers on it."""
        if kind == "layers":
            for worker in [pid for pid, layer in self._workers.items() if layer == name]:
                os.kill(worker, signal.SIGKILL)
                os.waitpid(worker, 0)
                del self._workers[worker]
        discard(os.path.join(self._isolation.files, kind, name))

    def _clone(self, request: dict[str, Any], descriptor: int) -> None:
        with socket.socket(fileno=descriptor) as channel:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._lines[request["id"]] = ours
                    pid = self._isolation.clone()
                    if pid == 0:
                        self._become_sandbox(channel, theirs, request["announces"])
            except Exception as error:
                line = self._lines.pop(request["id"], None)
                if line is not None:
                    line.close()
                _send(channel, {"failure": f"cannot make the sandbox: {error}"})
                return
            self._pids[request["id"]] = pid
            self._ids[pid] = request["id"]
            self._assign_ids(pid, request["id"], channel)

    def _assign_ids(self, pid: int, number: int, channel: socket.socket) -> None:
        descriptors: list[int] = []
        try:
            descriptors = self._isolation.assign_ids(pid)
            socket.send_fds(self._lines[number], [b"settled"], descriptors)
        except OSError as error:
            _send(channel, {"failure": f"cannot give the sandbox its user: {error}"})
            self._lines.pop(number).close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _begin(self, request: dict[str, Any], data: bytes, descriptors: list[int]) -> None:
        """Stores the template if it is new, then forwards the plan, unless the process has ended."""
        try:
            if request["new_template"]:
                digest = request["plan"]["digest"]
                store_in_child(os.path.join(self._isolation.files, "templates", digest), descriptors[0])
        except Exception as error:
            data = json.dumps({"failure": f"cannot make the sandbox: {error}"}).encode()
        line = self._lines.pop(request["id"], None)
        if line is not None:
            # A process that does not receive its plan ends with this socket, which the owner notices.
            with line, contextlib.suppress(OSError):
                line.send(data)

    def _become_sandbox(self, channel: socket.socket, line: socket.socket, announces: bool) -> NoReturn:
        """Main function of the child. Never returns into the fork server's loop."""
        code = 1
        try:
            self._drop_inherited()
            assigned, descriptors, _, _ = socket.recv_fds(line, 16, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            if announces and assigned:
                _send(channel, {"waiting": True})
            request = _receive_plan(channel, line) if assigned else None
            if request is not None:
                self._serve_sandbox(channel, request, descriptors)
            code = 0
        except (BrokenPipeError, ConnectionResetError):
            code = 0
        except BaseException as error:
            _send_error(channel, error)
        finally:
            self._isolation.clean_up()
            os._exit(code)

    def _serve_sandbox(self, channel: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
        if "failure" in request:
            _send(channel, request)
            return
        limits = request["limits"]
        plan = namespaces.Plan(**{k: _tuple(v) for k, v in request["plan"].items()})
        workspace, processes, disk, sockets, collector = self._isolation.enter(plan, request, descriptors)
        settings = Settings(
            limits["memory_bytes"],
            limits["cpu_s"],
            self._path,
            request["env"],
            limits["open_files"],
            request["has_groups"],
            sockets=sockets,
        )
        line = channel.detach()
        Server(line, line, workspace, processes, settings, disk, collector=collector).serve()

    def _drop_inherited(self) -> None:
        """In a child: closes what belongs to the fork server only."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for line in self._lines.values():
            line.close()
        for descriptor in (self._owner, self._wake_reader, self._wake_writer):
            os.close(descriptor)

    def _start_layer_worker(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Handles the request in a child process: a large copy must not delay others."""
        channel = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError as error:
            _send(channel, {"failure": f"cannot work on a layer: {error}"})
            pid = -1
        if pid == 0:
            try:
                self._drop_inherited()
                directory = os.path.join(self._isolation.files, "layers", request["layer"])
                if request["op"] == "merge":
                    merge_layers(directory, request["below"])
                else:
                    work_on_layer(request, directory, descriptors[1])
                _send(channel, {"ready": True})
            except BaseException as error:
                _send_error(channel, error)
            finally:
                os._exit(0)
        if pid > 0:
            self._workers[pid] = request["layer"]
        channel.close()
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def work_on_layer(request: dict[str, Any], directory: str, descriptor: int) -> None:
    """Copies, packs or unpacks a layer. Raises OSError, LayerError."""
    if request["op"] == "copy":
        for name in (layers.ROOT, layers.TEMPORARY):
            os.makedirs(os.path.join(directory, name))
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            source = os.open(name, flags, dir_fd=descriptor)
            layers.copy_tree(source, os.open(os.path.join(directory, name), flags))
        return
    part = os.path.join(directory, request["part"])
    if request["op"] == "pack":
        with os.fdopen(descriptor, "wb") as file:
            packing.pack_tree(part, file)
    else:
        os.makedirs(part)
        with os.fdopen(descriptor, "rb") as file:
            packing.unpack_tree(file, part)


def merge_layers(directory: str, below: Sequence[str]) -> None:
    """Merges several layers of the same parent directory, uppermost first, into one. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    trash = os.path.join(directory, "trash")
    os.makedirs(trash)
    for part in (layers.ROOT, layers.TEMPORARY):
        merged = os.path.join(directory, part)
        os.mkdir(merged)
        for name in reversed(below):
            source = os.path.join(os.path.dirname(directory), name, part)
            layers.merge_tree(os.open(source, flags), os.open(merged, flags), os.open(trash, flags))
    layers.remove_tree(trash)


def _receive_plan(channel: socket.socket, line: socket.socket) -> dict[str, Any] | None:
    """Waits for the plan from the fork server; None if that or the owner has ended."""
    poll = select.poll()
    for waiting in (channel, line):
        poll.register(waiting, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    with line:
        data = line.recv(MAX_REQUEST_BYTES) if line.fileno() in ready else b""
    return json.loads(data) if data else None


def _send_error(channel: socket.socket, error: BaseException) -> None:
    """Sends the owner the error that ended this process, if the channel is still open."""
    if channel.fileno() < 0:
        return
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENAMETOOLONG):
        # The agent's tree is too deep to be copied.
        _send(channel, {"fault": list(faults.TOO_DEEP)})
        return
    if isinstance(error, packing.UnpackableError):
        _send(channel, {"fault": ["argument", str(error)]})
        return
    failure = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2000:]}"
    _send(channel, {"failure": failure})


def _send(channel: socket.socket, header: dict[str, Any]) -> None:
    """Sends a frame; ignores a closed channel."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.sendall(pack(header))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def store_in_child(directory: str, descriptor: int) -> None:
    """Calls `store_template` in a child: data read by this process would be in the memory of later sandboxes.

    Raises OSError.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store_template(directory, descriptor)
            code = 0
        except BaseException as error:
            os.write(writer, str(error).encode(errors="replace")[:4096])
        finally:
            os._exit(code)
    os.close(writer)
    os.close(descriptor)
    with os.fdopen(reader, "rb") as file:
        message = file.read()
    if os.waitpid(pid, 0)[1]:
        raise OSError(message.decode(errors="replace"))


def store_template(directory: str, descriptor: int) -> None:
    """Writes the files of a packed template (one frame in a memfd) below a new directory."""
    with os.fdopen(descriptor, "rb") as file:
        ((header, payload),) = Unpacker().feed(file.read())
    if os.path.isdir(directory):
        return
    making = f"{directory}.making"
    layers.remove_tree(making)
    os.mkdir(making)
    start = 0
    for path, size in header["files"]:
        full = os.path.join(making, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as target:
            target.write(payload[start : start + size])
        start += size
    os.rename(making, directory)


def main(arguments: Sequence[str]) -> None:
    """Arguments: control socket, owner's pidfd, a base folder or `namespaces`; for the latter also: directory
    of image layers or "", view of the host as JSON, and the arguments of `ids.SpareIds` if there are any."""
    control = socket.socket(fileno=int(arguments[0]))
    owner = int(arguments[1])
    for name in WARM_MODULES:
        __import__(name)
    prefix = os.path.realpath(sys.base_prefix)
    path = ":".join(dict.fromkeys((f"{prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin")))
    try:
        lock = None
        if arguments[2] == "namespaces":
            images, view = arguments[3], json.loads(arguments[4])
            users, lock = ids.reserve_ids(arguments[5:], images)
            namespaces.isolate_fork_server(prefix, images, view, users.map_server)
            if view and view["programs"]:
                path = f"{view['programs']}:{path}"
            isolation: Isolation = Namespaces(users)
        else:
            isolation = Folders(arguments[2])
            path = os.environ.get("PATH", path)
        pid = os.fork()
        if pid == 0:
            if lock is not None:
                lock.close()
            _serve(control, owner, isolation, path)
    except OSError as error:
        control.send(json.dumps({"failure": str(error), "errno": error.errno}).encode())
        raise SystemExit(1) from error
    control.close()
    os.close(owner)
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _serve(control: socket.socket, owner: int, isolation: Isolation, path: str) -> NoReturn:
    code = 1
    try:
        kernel.die_with_parent()
        if isinstance(isolation, Namespaces):
            namespaces.mount_fork_server()
        sys.path[:] = [entry for entry in sys.path if entry.startswith(sys.base_prefix)]
        gc.collect()
        gc.freeze()
        ForkServer(control, owner, isolation, path).serve()
        isolation.close()
        code = 0
    except OSError as error:
        control.send(json.dumps({"failure": str(error), "errno": error.errno}).encode())
    finally:
        os._exit(code)
