"""The shell sessions of a sandbox: opened, given commands one at a time, ended with all they started."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.frames import Header
from etude.sandbox.inside.jobs import ChildLimits, Job, program_child
from etude.sandbox.inside.processes import Processes, Table, families, kill_all_but
from etude.sandbox.inside.settings import Settings, check_texts
from etude.sandbox.inside.shells import STATUS_DESCRIPTOR, Shell, shell_program
from etude.sandbox.inside.wire import Wire

if TYPE_CHECKING:
    from etude.sandbox.inside.running import Running

Answer = tuple[Header, bytes]
_NO_SESSION = "session", "no such session is open: it has ended, or never began"


class Sessions:
    """Starts and ends shells. Part of the server's one thread; waits for nothing."""

    def __init__(
        self,
        wire: Wire,
        poll: select.poll,
        processes: Processes,
        settings: Settings,
        limits: ChildLimits,
        root: str,
        jobs: Running,
    ) -> None:
        self._wire = wire
        self._poll = poll
        self._processes = processes
        self._settings = settings
        self._limits = limits
        self._root = root
        self._jobs = jobs
        self._shells: dict[str, Shell] = {}
        self._num_shells = 0
        self.operations: dict[str, Callable[[Header, bytes], Answer | None]] = {
            "shell.open": self._open,
            "shell.run": self._run,
            "shell.close": self._close,
        }

    def pids(self) -> list[int]:
        """The shells that live."""
        return [shell.job.pid for shell in self._shells.values()]

    def shell_jobs(self) -> Iterator[Job]:
        """The shells as jobs."""
        return (shell.job for shell in self._shells.values())

    def deadlines_s(self) -> list[float]:
        """When each shell wants to be looked after."""
        return [shell.next_deadline_s() for shell in self._shells.values()]

    def on_ready(self, descriptor: int) -> None:
        """A pipe of a shell has something, or takes something."""
        for shell in self._shells.values():
            if shell.owns(descriptor):
                shell.on_ready(descriptor)
                self._settle(shell, None)
                return

    def look_after(self, ended: Mapping[int, int], now_s: float) -> None:
        """Enforces deadlines, and answers for shells whose wait status is among `ended`."""
        for shell in list(self._shells.values()):
            if shell.job.pid in ended:
                self._end(shell, os.waitstatus_to_exitcode(ended[shell.job.pid]))
            else:
                self._expire(shell, now_s)

    def cancel(self, request_id: int, now_s: float) -> None:
        """Nobody waits for a command any longer: it ends now, or never begins."""
        for shell in self._shells.values():
            shell.queue = [row for row in shell.queue if row[0]["id"] != request_id]
            if shell.request_id == request_id:
                shell.cancelled = True
                shell.deadline_s = now_s

    def put_off(self, since_s: float, now_s: float) -> None:
        """All stood still in between: that does not count as their commands' time."""
        for shell in self._shells.values():
            shell.put_off(since_s, now_s)

    def end_all(self) -> None:
        """Answers for every shell as killed; the processes are dead already."""
        for shell in list(self._shells.values()):
            self._end(shell, -signal.SIGKILL)

    def _open(self, header: Header, payload: bytes) -> Answer:
        name = f"session-{self._num_shells + 1}"
        program = shell_program()
        argv = [program, "--noprofile", "--norc"] if program.endswith("bash") else [program]
        cwd = os.path.join(self._root, header["cwd"])
        if not os.path.isdir(cwd):
            raise Fault("missing", "no such directory")
        env = self._settings.environment(self._root, header["env"])
        check_texts(env.values(), env)
        child = program_child(argv, env, cwd, self._limits)
        shell = self._jobs.insist(lambda: Shell(name, child, self._poll))
        self._num_shells += 1
        self._shells[name] = shell
        self._poll.register(shell.job.watch, select.POLLIN)
        self._jobs.note_child(shell.job.start_s)
        return {"session": name, "status_fd": STATUS_DESCRIPTOR}, b""

    def _run(self, header: Header, payload: bytes) -> None:
        shell = self._shells.get(header["session"])
        if shell is None:
            raise Fault(*_NO_SESSION)
        check_texts([header["cmd"]], ())
        before = self._processes.table()
        if shell.cancelled:
            shell.queue.append((header, before))
        elif shell.request_id:
            raise Fault("argument", "another command still runs in this session")
        else:
            _begin(shell, header, before)

    def _close(self, header: Header, payload: bytes) -> Answer:
        shell = self._shells.get(header["session"])
        if shell is not None:
            self._kill_family(shell)
            self._end(shell, -signal.SIGKILL)
        return {}, b""

    def _expire(self, shell: Shell, now_s: float) -> None:
        if now_s < shell.next_deadline_s():
            return
        due = shell.expire(self._processes.table(), now_s)
        if due == "command":
            self._kill_below(shell)
        elif due == "shell":
            self._kill_family(shell)

    def _kill_family(self, shell: Shell) -> None:
        kill_all_but(self._processes, lambda table: set(table) - families(table, [shell.job.pid]))

    def _kill_below(self, shell: Shell) -> None:
        """Ends what the shell's present command started; the shell and its older jobs stay."""

        def spare(table: Table) -> set[int]:
            others = self._jobs.job_pids()
            others += [other.job.pid for other in self._shells.values() if other is not shell]
            return shell.spare | families(table, others) | {shell.job.pid}

        kill_all_but(self._processes, spare)

    def _settle(self, shell: Shell, exit_status: int | None) -> None:
        answer = shell.settle(exit_status)
        if answer is not None:
            self._wire.send(*answer)
            if shell.queue and exit_status is None:
                _begin(shell, *shell.queue.pop(0))

    def _end(self, shell: Shell, exit_status: int) -> None:
        for output in shell.job.outputs:
            if not output.ended:
                shell.on_ready(output.descriptor)
        self._settle(shell, exit_status)
        for header, _ in shell.queue:
            self._wire.send({"fault": list(_NO_SESSION), "id": header["id"]})
        del self._shells[shell.name]
        self._poll.unregister(shell.job.watch)
        shell.close()


def _begin(shell: Shell, header: Header, before: Table) -> None:
    shell.run(header["id"], header["cmd"], header["timeout_s"], header["limit_bytes"], before)
