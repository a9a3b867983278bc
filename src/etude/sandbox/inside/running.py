"""Execution of commands, test runs and background commands in a sandbox, until their end."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from etude.sandbox.inside.ended import EndedCommands
from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.jobs import (
    Child,
    ChildLimits,
    Job,
    Output,
    limit_own_memory,
    shell_child,
    start_job,
    tests_child,
)
from etude.sandbox.inside.memory_watch import MemoryWatch
from etude.sandbox.inside.processes import (
    Processes,
    extension_s,
    families,
    kill_all_but,
    reap,
    resume_all,
    stop_all,
)
from etude.sandbox.inside.settings import Settings, check_texts
from etude.sandbox.inside.wire import Wire

MAX_RESULT_BYTES = 4 << 20
_RETRY_S, _RETRY_PAUSE_S = 20.0, 0.002
"""How long, and how often, a start is retried: killed processes count until they have been reaped."""

_DEATH_S = 2.0
"""How long to wait for the end of killed processes."""

Answer = tuple[Header, bytes]


class JobRunner:
    """Starts, watches and ends jobs. Runs in the server's only thread and does not block it."""

    def __init__(
        self, wire: Wire, poll: select.poll, processes: Processes, settings: Settings, root: str
    ) -> None:
        self._wire = wire
        self._poll = poll
        self._processes = processes
        self._settings = settings
        self._limits = ChildLimits(settings.memory_bytes, settings.cpu_s, settings.open_files, settings.uid)
        if settings.uid is None:
            limit_own_memory(settings.memory_bytes)
        self._root = root
        self._jobs: dict[int, Job] = {}
        self._by_descriptor: dict[int, Job] = {}
        self._ended = EndedCommands()
        self.has_children = False
        """Whether there are children that run or are not reaped."""
        self._memory = MemoryWatch(processes, settings)
        self._reaped: dict[int, int] = {}
        self._stopped: set[int] = set()
        self._frozen_s: float | None = None
        """Time of the freeze; None if not frozen."""
        self._muted: list[Output] = []
        wire.on_drained = self._unmute_outputs
        self.operations: dict[str, Callable[[Header, bytes], Answer | None]] = {
            "command": self._command,
            "tests": self._tests,
            "probes": self._tests,
            "wait": self._wait,
            "stdin": self._stdin,
            "kill": self._kill,
            "processes": self._list,
            "lookup": self._lookup,
            "cancel": self._cancel,
            "freeze": self._freeze,
            "thaw": self._thaw,
        }

    # Called by the server's loop

    def timeout_ms(self) -> float | None:
        """How long the loop may sleep; None: without limit."""
        if not self.has_children or self._frozen_s is not None:
            return None
        deadlines = [self._memory.next_s] if self._settings.watch_memory else []
        deadlines += [job.deadline_s for job in self._jobs.values()]
        until_s = min(deadlines, default=float("inf"))
        if until_s == float("inf"):
            return None
        return max(0.0, (until_s - time.monotonic()) * 1e3 + 1.0)

    def on_ready(self, descriptor: int) -> None:
        """Handles a poll event of a child's pipe or pidfd."""
        job = self._by_descriptor.get(descriptor)
        if job is not None:
            self._read_output(job, descriptor)

    def check_jobs(self) -> None:
        """Reaps children, enforces deadlines and memory limits, answers for ended jobs."""
        if not self.has_children and not self._reaped:
            return
        # Read before reaping: a process that ends in between was in time.
        now_s = time.monotonic() if self._frozen_s is None else self._frozen_s
        self._reap()
        ended, self._reaped = self._reaped, {}
        if self._settings.watch_memory and self.has_children and now_s >= self._memory.next_s:
            self._memory.schedule_next(now_s)
            self._watch_memory()
        for job in list(self._jobs.values()):
            if job.pid in ended:
                self._finish(job, os.waitstatus_to_exitcode(ended[job.pid]))
            elif now_s >= job.deadline_s and not self._extend_deadline(job, now_s):
                job.timed_out = True
                self._kill_family(job)
                self._finish(job, -signal.SIGKILL)

    def _extend_deadline(self, job: Job, now_s: float) -> bool:
        """Whether a job at its deadline gets more time; sets the new deadline."""
        table = self._processes.table()
        rows = (table[pid] for pid in families(table, [job.pid]) - job.existing if pid in table)
        more_s = extension_s(rows, job.timeout_s, now_s - job.start_s)
        job.deadline_s = now_s + more_s
        return more_s > 0

    def end_all(self) -> None:
        """Kills all processes of the sandbox and removes their shared memory; answers for all jobs."""
        self._processes.kill_all()
        self._await_ends()
        self._processes.remove_shared_memory()
        for job in list(self._jobs.values()):
            job.keep_background = True
            self._finish(job, -signal.SIGKILL)

    def _await_ends(self) -> None:
        """Waits until killed processes have ended: until then they hold memory, leases and open files."""
        end_s = time.monotonic() + _DEATH_S
        self._reap()
        while self.has_children and time.monotonic() < end_s:
            time.sleep(_RETRY_PAUSE_S)
            self._reap()

    def _reap(self) -> None:
        """Reaps ended children, for `check_jobs`."""
        ended, self.has_children = reap()
        self._reaped.update(ended)

    # Commands and test runs

    def _command(self, header: Header, payload: bytes) -> Answer | None:
        background = bool(header.get("background"))
        env = self._settings.environment(self._root, header["env"])
        cwd = os.path.join(self._root, header["cwd"])
        check_texts([header["cmd"], *env.values(), header["cwd"]], env)
        child = shell_child(header["cmd"], env, cwd, self._limits)
        wants_input = background or bool(header.get("stdin"))
        job = self._start(child, 2, header["limit_bytes"], header["timeout_s"], True, wants_input)
        job.cmd = header["cmd"]
        job.stream = bool(header.get("stream"))
        if job.input is not None and not background:
            self._feed(job, payload, close=True)
        if background:
            job.started_by = header["id"]
            return {"pid": job.pid}, b""
        job.request_id = header["id"]
        return None

    def _tests(self, header: Header, payload: bytes) -> None:
        child = tests_child(header["paths"], self._root, header["op"] == "probes", self._limits)
        job = self._start(child, 1, MAX_RESULT_BYTES, header["timeout_s"], False, False)
        job.request_id = header["id"]

    def _start(
        self,
        child: Child,
        num_pipes: int,
        limit_bytes: int,
        timeout_s: float | None,
        keep_background: bool,
        with_input: bool,
    ) -> Job:
        existing = set(self._processes.table()) if self.has_children else set[int]()
        job = self._start_with_retry(
            lambda: start_job(child, num_pipes, limit_bytes, timeout_s, existing, keep_background, with_input)
        )
        self._jobs[job.pid] = job
        self.has_children = True
        self._memory.schedule_next(job.start_s)
        self._poll.register(job.pidfd, select.POLLIN)
        for output in job.outputs:
            self._by_descriptor[output.descriptor] = job
            output.register(self._poll)
        return job

    def _start_with_retry(self, start: Callable[[], Job]) -> Job:
        """Starts a child. If the agent's processes have used up the process limit, they are killed first.

        Raises OSError.
        """
        end_s = time.monotonic() + _RETRY_S
        while True:
            try:
                return start()
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise
                self._processes.kill_all()
                self._reap()
                time.sleep(_RETRY_PAUSE_S)

    def _read_output(self, job: Job, descriptor: int) -> None:
        if job.input is not None and descriptor == job.input.descriptor:
            self._feed(job, b"", close=False)
            return
        for index, output in enumerate(job.outputs):
            if output.descriptor != descriptor:
                continue
            if job.stream and self._wire.congested:
                output.unregister()
                self._muted.append(output)
                return
            self._send_output(job, index, output.read())

    def _send_output(self, job: Job, index: int, data: bytes) -> None:
        if job.stream and data:
            event = {
                "event": "output",
                "pid": job.pid,
                "id": job.request_id or job.started_by,
                "fd": index + 1,
            }
            self._wire.send(event, data)

    def _unmute_outputs(self) -> None:
        muted, self._muted = self._muted, []
        for output in muted:
            output.register(self._poll)

    def _feed(self, job: Job, data: bytes, close: bool) -> None:
        """Writes to a job's input, and continues as the job reads."""
        assert job.input is not None, "the caller has checked that the job has an input"
        descriptor = job.input.descriptor
        job.input.write(data, close)
        if job.input.pending:
            self._by_descriptor[descriptor] = job
            self._poll.register(descriptor, select.POLLOUT)
        elif self._by_descriptor.pop(descriptor, None):
            self._poll.unregister(descriptor)

    def _finish(self, job: Job, exit_code: int) -> None:
        """Answers for an ended job; kills the processes that it left, unless it may keep them."""
        duration_s = time.monotonic() - job.start_s
        if self.has_children and not (job.keep_background or job.timed_out):
            self._kill_family(job)
        for index, output in enumerate(job.outputs):
            data = b"" if output.ended else output.read()
            self._send_output(job, index, data)
        outputs = [output.pop_data() for output in job.outputs]
        self._close(job)
        answer: Header = {
            "exit_code": exit_code,
            "timed_out": job.timed_out,
            "memory_exceeded": job.memory_exceeded,
            "duration_s": duration_s,
            "truncated": any(output.truncated for output in job.outputs),
            "sizes": [len(data) for data in outputs],
        }
        payload = b"".join(outputs)
        if job.request_id:
            self._wire.send({**answer, "id": job.request_id}, payload)
            return
        for request_id in job.waiting:
            self._wire.send({**answer, "id": request_id}, payload)
        self._ended.add(job, answer, payload)

    def _close(self, job: Job) -> None:
        del self._jobs[job.pid]
        if job.input is not None and not job.input.closed:
            if self._by_descriptor.pop(job.input.descriptor, None):
                self._poll.unregister(job.input.descriptor)
            job.input.close()
        self._poll.unregister(job.pidfd)
        os.close(job.pidfd)
        for output in job.outputs:
            del self._by_descriptor[output.descriptor]
            if output in self._muted:
                self._muted.remove(output)
            output.close()

    # Killing the processes of one job

    def _kill_family(self, job: Job) -> None:
        others = [other.pid for other in self._jobs.values() if other is not job]
        if not others and not job.existing:
            self._processes.kill_all()
        else:
            kill_all_but(self._processes, lambda table: job.existing | families(table, others))
        self._reap()

    def _watch_memory(self) -> None:
        if self._memory.is_exceeded():
            self._processes.kill_all()
            for job in self._jobs.values():
                job.memory_exceeded = True

    # Background commands

    def _wait(self, header: Header, payload: bytes) -> Answer | None:
        job = self._jobs.get(header["pid"])
        if job is not None and not job.request_id:
            job.waiting.append(header["id"])
            return None
        job, answer, data = self._ended.find(header["pid"])
        job.waiting.append(header["id"])
        return dict(answer), data

    def _stdin(self, header: Header, payload: bytes) -> Answer:
        job = self._jobs.get(header["pid"])
        if job is None or job.input is None:
            self._ended.find(header["pid"])
            raise Fault("argument", "the command has ended")
        if job.input.closed:
            raise Fault("argument", "the command's input is closed")
        self._feed(job, payload, header["close"])
        return {}, b""

    def _kill(self, header: Header, payload: bytes) -> Answer:
        job = self._jobs.get(header["pid"])
        if job is None or job.request_id:
            return {"killed": False}, b""
        kill_all_but(self._processes, lambda table: set(table) - families(table, [job.pid]))
        return {"killed": True}, b""

    def _list(self, header: Header, payload: bytes) -> Answer:
        rows = [[job.pid, job.cmd, True, None] for job in self._jobs.values() if not job.request_id]
        rows += [[pid, job.cmd, False, answer["exit_code"]] for pid, job, answer in self._ended.unawaited()]
        return {"processes": rows}, b""

    def _lookup(self, header: Header, payload: bytes) -> Answer:
        if header["pid"] not in self._jobs or self._jobs[header["pid"]].request_id:
            self._ended.find(header["pid"])
        return {}, b""

    def _cancel(self, header: Header, payload: bytes) -> None:
        """Ends the job of a request whose caller is gone. Has no answer."""
        target = header["target"]
        for job in list(self._jobs.values()):
            if job.request_id == target:
                self._kill_family(job)
                self._close(job)
            elif target in job.waiting:
                job.waiting.remove(target)
        self._ended.forget_request(target)

    # Freezing, for a copy

    def _freeze(self, header: Header, payload: bytes) -> Answer:
        """Stops all processes, and the clocks of the jobs, until `thaw`."""
        if self._frozen_s is None:
            self._frozen_s = time.monotonic()
        self._stopped |= stop_all(self._processes) if self.has_children else set[int]()
        return {}, b""

    def _thaw(self, header: Header, payload: bytes) -> Answer:
        since_s, self._frozen_s = self._frozen_s, None
        if since_s is not None:
            now_s = time.monotonic()
            for job in self._jobs.values():
                job.exclude_pause(since_s, now_s)
        resume_all(self._stopped)
        self._stopped = set()
        return {}, b""
