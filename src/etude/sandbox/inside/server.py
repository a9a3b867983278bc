"""The server of one sandbox: pid 1 inside (or its child in a guest), and the warm interpreter of test runs.

One thread, one poll loop over the owner's line, the pipes and pidfds of jobs, and forwarded connections. File
operations are answered at once; commands and test runs proceed concurrently. No wait is without a deadline.
The server ends when the owner's line ends, and in a pid namespace the kernel then ends all other processes;
if the line can be reconnected (a restored guest), it continues.

Every request has an id and one answer: a result, `fault` (an error of the agent) or `failure` (an error of
ours). Events (`output`, `net.*`) are sent without a request.
"""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from etude.sandbox.inside import faults
from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.filesystem import Workspace
from etude.sandbox.inside.forward import FRAMES, Forwarder
from etude.sandbox.inside.frames import FrameError, Header
from etude.sandbox.inside.gathering import ChangeCollector, Skipped
from etude.sandbox.inside.processes import Processes
from etude.sandbox.inside.running import JobRunner, Settings
from etude.sandbox.inside.watches import Watch
from etude.sandbox.inside.wire import Wire

FILE_OPERATION_WALL_S = 20.0
"""Wall-clock limit of a file operation, for busy machines; the owner's timeout is longer."""
ALARM_REPEAT_S = 1.0
"""Interval at which the alarm repeats: an alarm that arrives while another is handled is ignored."""
BATCH_READ_BYTES = 4 << 20
"""Size at which a batched read stops; the remaining files are left to another request."""
RECONNECT_POLL_MS = 10.0
"""How often the server of a guest checks for a new owner."""

Answer = tuple[Header, bytes | bytearray]
Operation = Callable[[Header, bytes], Answer | None]
Greet = Callable[[Header], None]


class Server:
    """Serves one sandbox until the owner's line ends."""

    def __init__(
        self,
        reader: int,
        writer: int,
        workspace: Workspace,
        processes: Processes,
        settings: Settings,
        scratch: int | None = None,
        greet: Greet = lambda header: None,
        extra: Mapping[str, Operation] | None = None,
        collector: ChangeCollector | None = None,
        watches: Sequence[Watch] = (),
    ) -> None:
        """`scratch`: a descriptor that the owner may borrow to copy the sandbox's files.

        `greet` is called for the owner's `hello` after a restore: it sets clock, entropy and identity.
        `extra`: operations of some machines only. `collector`: of changes in the sandbox's root. `watches`:
        enforce limits that the kernel does not.
        """
        self._poll = select.poll()
        self._wire = Wire(reader, writer, self._poll)
        self._workspace = workspace
        self._collector = collector or ChangeCollector(workspace.root)
        self._runner = JobRunner(self._wire, self._poll, processes, settings, workspace.root)
        self._scratch = scratch
        self._greet = greet
        self._watches = watches
        self._file_operation_s = settings.file_operation_s
        self._forwarder: Forwarder | None = None
        self._file_operations: dict[str, Operation] = {
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "remove": self._remove,
            "grep": self._grep,
            "diff": self._diff,
        }
        self._collector_operations: dict[str, Operation] = {
            "changed": self._changed,
            "kinds": self._kinds,
            "pack": self._pack,
        }
        self._machine_operations: dict[str, Operation] = {
            "lend": self._lend,
            "hold": self._hold,
            "hello": self._hello,
            "net.listen": self._listen,
            **(extra or {}),
        }

    def serve(self, returning: bool = False) -> None:
        """Serves until the owner closes its end. `returning`: then waits for the next owner, forever."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, _on_alarm)
        self._wire.send({"ready": True})
        while True:
            while self._poll_once(self._runner.timeout_ms()):
                pass
            if not returning:
                return
            self._wire.disconnect()
            while not self._wire.connected():
                self._poll_once(RECONNECT_POLL_MS)

    def _poll_once(self, timeout_ms: float | None) -> bool:
        """Polls once and handles the events. False when the owner is gone."""
        for watch in self._watches if self._runner.has_children else ():
            timeout_ms = watch.limit_timeout(timeout_ms)
        for descriptor, events in self._poll.poll(timeout_ms):
            if descriptor == self._wire.writer and events & select.POLLOUT:
                self._wire.flush()
            if descriptor == self._wire.reader:
                if events & ~select.POLLOUT and not self._receive():
                    return False
            elif self._forwarder is not None and self._forwarder.owns(descriptor):
                self._forwarder.on_ready(descriptor, events)
            elif descriptor != self._wire.writer:
                self._runner.on_ready(descriptor)
        self._runner.check_jobs()
        for watch in self._watches:
            watch.check()
        return True

    def _receive(self) -> bool:
        frames = self._wire.receive()
        if frames is None:
            return False
        if len(frames) > 1:
            with self._wire.batching():
                self._handle_all(frames)
        else:
            self._handle_all(frames)
        return True

    def _handle_all(self, frames: list[tuple[Header, bytes]]) -> None:
        for header, payload in frames:
            if header["op"] in FRAMES:
                if self._forwarder is not None:
                    self._forwarder.handle(header, payload)
            else:
                self._handle(header, payload)

    def _handle(self, header: Header, payload: bytes) -> None:
        operation = header["op"]
        try:
            if operation in self._file_operations:
                with _time_limit(self._file_operation_s):
                    answer = self._file_operations[operation](header, payload)
            elif operation in self._collector_operations:
                # Bounded by numbers of entries and bytes, so that the result does not depend on the load.
                with _time_limit(FILE_OPERATION_WALL_S):
                    answer = self._collector_operations[operation](header, payload)
            elif operation in self._machine_operations:
                # No limit but the owner's timeout: a `hello` that ended halfway would hold back all answers
                # forever, including its own.
                answer = self._machine_operations[operation](header, payload)
            else:
                answer = self._runner.operations[operation](header, payload)
        except Fault as fault:
            answer = {"fault": [fault.kind, fault.message]}, b""
        except OSError as error:
            fault = faults.from_os_error(error)
            answer = {"fault": [fault.kind, fault.message]}, b""
        except RecursionError:
            answer = {"fault": list(faults.TOO_DEEP)}, b""
        except MemoryError:
            answer = {"fault": list(faults.ANSWER_TOO_LARGE)}, b""
        except Exception as error:
            answer = {"failure": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-2000:]}"}, b""
        if answer is not None:
            try:
                self._wire.send({**answer[0], "id": header["id"]}, answer[1])
            except (FrameError, MemoryError):
                # The agent's names and lines may exceed a frame, which the owner would reject.
                self._wire.send({"fault": list(faults.ANSWER_TOO_LARGE), "id": header["id"]})

    # File operations

    def _read(self, header: Header, payload: bytes) -> Answer:
        if "more" in header:
            return self._read_batch([header["path"], *header["more"]], header["limit_bytes"])
        return {}, self._workspace.read(header["path"], header["limit_bytes"], header.get("offset", 0))

    def _read_batch(self, paths: list[str], limit_bytes: int) -> Answer:
        """The size of each file, or its fault; and the contents, in order.

        Stops after `BATCH_READ_BYTES`, to bound memory. An older server, which reads one file at a time,
        ignores `more`, and its answer has no `files`: see Files.read_many.
        """
        rows: list[int | list[str]] = []
        contents: list[bytes] = []
        room_bytes = BATCH_READ_BYTES
        for path in paths:
            try:
                data = self._workspace.read(path, limit_bytes)
            except Fault as fault:
                if rows and _is_time_over():
                    break  # the files before it have used up the time limit
                rows.append([fault.kind, fault.message])
                continue
            except OSError as error:
                fault = faults.from_os_error(error)
                rows.append([fault.kind, fault.message])
                continue
            rows.append(len(data))
            contents.append(data)
            room_bytes -= len(data)
            if room_bytes <= 0:
                break
        return {"files": rows}, b"".join(contents)

    def _write(self, header: Header, payload: bytes) -> Answer:
        start = 0
        for path, size in header["files"]:
            self._workspace.write(path, payload[start : start + size], bool(header.get("append")))
            start += size
        return {}, b""

    def _list(self, header: Header, payload: bytes) -> Answer:
        return {"entries": self._workspace.list(header["path"], header["depth"])}, b""

    def _remove(self, header: Header, payload: bytes) -> Answer:
        self._workspace.remove(header["path"])
        return {}, b""

    def _grep(self, header: Header, payload: bytes) -> Answer:
        return {"matches": self._workspace.grep(header["pattern"], header["path"], header["limit"])}, b""

    def _diff(self, header: Header, payload: bytes) -> Answer:
        if header["kill_processes"]:
            self._runner.end_all()
        sizes, name_bytes, data = self._workspace.diff(header["without"])
        return {"sizes": sizes, "name_bytes": name_bytes}, data

    def _changed(self, header: Header, payload: bytes) -> Answer:
        tops, names = frozenset(header["skip_tops"]), frozenset(header["skip_names"])
        return {}, self._collector.changed(Skipped(tops, names, header["skip_hidden"]))

    def _kinds(self, header: Header, payload: bytes) -> Answer:
        top, rows = self._collector.kinds()
        return {"workspace": top}, rows

    def _pack(self, header: Header, payload: bytes) -> Answer:
        paths = [os.fsdecode(path) for path in payload.split(b"\0")[:-1]]
        wanted = (header["below"], header["exclude"], header["limit_bytes"])
        return {}, self._collector.pack(paths, *wanted)

    # Operations on the machine as a whole

    def _lend(self, header: Header, payload: bytes) -> Answer | None:
        """Answers with the descriptor of the sandbox's own disk."""
        if self._scratch is None:
            raise Fault("argument", "this sandbox has no disk to lend")
        self._wire.lend({"id": header["id"]}, self._scratch)
        return None

    def _hold(self, header: Header, payload: bytes) -> None:
        """Holds back all frames after this answer until `hello`: the machine may be copied."""
        self._wire.send({"id": header["id"]})
        self._wire.hold()

    def _hello(self, header: Header, payload: bytes) -> None:
        """Resumes a held machine for an owner, perhaps a new one: sends the answer, then the held frames."""
        self._greet(header)
        self._wire.release({"id": header["id"], "time_s": time.time()})

    def _listen(self, header: Header, payload: bytes) -> Answer:
        if self._forwarder is None:
            self._forwarder = Forwarder(self._wire, self._poll, header["port"])
        else:
            # A new owner, which does not know the open streams.
            self._forwarder.drop_all()
        return {}, b""


_NEVER = (float("inf"), float("inf"))
_deadlines_s = _NEVER
"""Deadlines of the current operation: in processor time and in wall-clock time."""
_is_alarmed = False
"""Whether the alarm handler runs."""


def _is_time_over() -> bool:
    processor_s, wall_s = _deadlines_s
    return time.process_time() >= processor_s or time.monotonic() >= wall_s


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    # The agent may send this signal itself: it only counts when the time is over, and many of them must not
    # recurse into this handler until the stack is full.
    global _is_alarmed
    if _is_alarmed:
        return
    _is_alarmed = True
    try:
        if _is_time_over():
            signal.setitimer(signal.ITIMER_REAL, 0.0)  # raised once
            raise Fault(*faults.SLOW_PATTERN)
        if _deadlines_s != _NEVER:
            _set_alarm()
    finally:
        _is_alarmed = False


def _set_alarm() -> None:
    """Sets the alarm for the earliest moment at which the time may be over, then repeatedly."""
    processor_s, wall_s = _deadlines_s
    remaining_s = min(processor_s - time.process_time(), wall_s - time.monotonic())
    signal.setitimer(signal.ITIMER_REAL, max(0.0, remaining_s) + 1e-3, ALARM_REPEAT_S)


@contextmanager
def _time_limit(processor_s: float) -> Iterator[None]:
    """Raises Fault in the block when its time limit is over."""
    global _deadlines_s
    _deadlines_s = (time.process_time() + processor_s, time.monotonic() + FILE_OPERATION_WALL_S)
    _set_alarm()
    try:
        yield
    finally:
        _deadlines_s = _NEVER
        signal.setitimer(signal.ITIMER_REAL, 0.0)
