"""Runs calls on all ranks: the first rank leads, the others execute the same calls at the same time.

    lead     call(function) ── announce ──> compute ── collect outcomes ──> answer
    others   wait ──────────── receive  ──> compute ── report, wait again

The first rank is the process that runs everything else: rollouts, logs, checkpoints. The others hold one
object each, made by the same factory, and only call its methods when the lead does. An error of a method that
every rank raises alike (bad input) is raised to the caller, and the team continues. After any other error
ranks are in different states: the team ends, on every rank, with RankError. A rank that dies closes its
connections, so those that wait for it fail at once; one that hangs fails after `parallel.timeout_s`.

Ranks are started here (`Team.spawn`), on one machine, or by `torchrun` (`Team.join`), on any number.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from etude.config.parallel import ParallelConfig
from etude.errors import ConfigError, EtudeError, RankError
from etude.training.checkpoints.shards import lost_rank
from etude.training.parallel.mesh import Mesh

T = TypeVar("T")

TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public, if not by its own __all__)

_CPU = torch.device("cpu")
_POLL_S = 0.02
_DEATH_S = 2.0
"""How long a process is given to end after its connections have been closed."""
_START_S = 600.0
"""How long ranks may take to start."""
_GRACE_S = 15.0
"""How long a failed rank waits for the others' outcomes, before it ends and so wakes those waiting for it."""
_LEAD, _GO, _CLOSE = "lead", "go", "close"
_OK = b""
_NETWORK_ERRORS = (dist.DistError, ConnectionError)
Factory = Callable[..., T]
"""Called on every rank with its MeshRanks and the team's arguments."""


_Command = tuple[Callable[..., Any], tuple[Any, ...], bool]
"""A function for every rank to call, its arguments, and whether it makes the rank's object: it is passed the
object, or, to make that, the MeshRanks."""


class _Member(Generic[T]):
    """One rank of the team, the lead or another: its process group, its store, and its object."""

    def __init__(
        self,
        config: ParallelConfig,
        store: Store,
        rank: int,
        device: str,
        processes: Sequence[BaseProcess] = (),
    ) -> None:
        self.config = config
        self.rank = rank
        self.store = PrefixStore("team", store)
        self.store.set(f"here/{rank}", "")
        for other in range(config.ranks):  # with a timeout longer than a step's, since imports take long
            self.wait_for(f"here/{other}", other, _START_S, processes)
        timeout = timedelta(seconds=config.timeout_s)
        store.set_timeout(timeout)
        backend = "gloo"
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=rank,
            world_size=config.ranks,
            timeout=timeout,
        )
        # What it needs of PyTorch takes half a second to import: only where there are several ranks.
        from etude.training.parallel.mesh_ranks import MeshRanks

        self.ranks = MeshRanks(Mesh(config, device))
        self.instance: T | None = None
        self.number = 0

    def announce(self, what: str) -> None:
        """Announces the lead's next action to the others. The keys of the command before the last are
        deleted: all ranks have reported on the last one since, so none reads them any more."""
        self.number += 1
        self.store.set(f"{self.number}/next", what)
        if self.number > 2:
            for name in ("next", *range(self.config.ranks)):
                self.store.delete_key(f"{self.number - 2}/{name}")

    def run(self, command: _Command) -> Any:
        """Executes the command and reports its outcome to the other ranks."""
        function, arguments, makes = command
        outcome = pickle.dumps(RankError("ended in the middle of a step", field=f"rank {self.rank}"))
        try:
            result = function(self.ranks if makes else self.instance, *arguments)
            if makes:
                self.instance = result
            outcome = _OK
        except Exception as error:
            outcome = _pickled(error)
            raise
        finally:
            with contextlib.suppress(*_NETWORK_ERRORS):  # the store has ended with the lead
                self.store.set(f"{self.number}/{self.rank}", cast(str, outcome))  # bytes are as good
        return result

    def outcome_of(
        self, rank: int, within_s: float, processes: Sequence[BaseProcess] = ()
    ) -> Exception | None:
        """The exception that `rank` raised in the current command, if any. Raises RankError if it does not
        report in time, or if one of `processes` has died."""
        key = f"{self.number}/{rank}"
        self.wait_for(key, rank, within_s, processes)
        stored = self.store.get(key)
        return pickle.loads(stored) if stored else None

    def wait_for(self, key: str, rank: int, within_s: float, processes: Sequence[BaseProcess]) -> None:
        """Waits until `rank` has set `key`. Raises RankError as `outcome_of`."""
        deadline = time.monotonic() + within_s
        while not self.store.check([key]):  # the store's own wait would print a warning each time
            dead = _dead(processes)
            if dead or time.monotonic() > deadline:
                raise RankError(dead or f"did not answer for {within_s:.0f} s", field=f"rank {rank}")
            time.sleep(_POLL_S)


class Team(Generic[T]):
    """The lead's side. Not thread-safe: one call at a time, as from a loop."""

    def __init__(self, member: _Member[T], processes: list[BaseProcess]) -> None:
        self._member = member
        self._processes = processes
        self._broken = False

    @staticmethod
    def spawn(config: ParallelConfig, device: str = "cpu", num_threads: int = 1) -> Team[Any]:
        """Starts the other ranks on this machine; `num_threads`: compute threads of each.

        Raises RankError if they fail to start.
        """
        _stay_on_loopback()
        store, port = _loopback_store()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", __name__])
        processes: list[BaseProcess] = [
            context.Process(target=_spawned, args=(config, port, rank, device, num_threads), daemon=True)
            for rank in range(1, config.ranks)
        ]
        with _stops_are_for_the_lead():
            for process in processes:
                process.start()
        atexit.register(_end, processes, at_once=True)  # before multiprocessing's own, which sends SIGTERM
        try:
            with _group_errors(processes):
                return Team(_Member(config, store, 0, device, processes), processes)
        except RankError:
            _end(processes, at_once=True)
            raise

    @staticmethod
    def join(config: ParallelConfig, device: str = "cpu") -> Team[Any] | None:
        """Leads the processes that `torchrun` started; None if it did not start this one.

        Raises RankError if the others do not connect, ConfigError as `check_world`.
        """
        check_world(config)
        if not _started_by_torchrun():
            return None
        with _group_errors([]):
            store, rank, _ = next(iter(rendezvous("env://")))
            store.set(_LEAD, "")
            return Team(_Member(config, store, rank, device), [])

    @staticmethod
    def follow(config: ParallelConfig, device: str = "cpu") -> None:
        """Executes the commands of the first process that `torchrun` started, until it closes its team. Waits
        for them without a timeout. Raises RankError if other ranks fail."""
        with _group_errors([]):
            store, rank, _ = next(iter(rendezvous("env://")))
            while not store.check([_LEAD]):
                time.sleep(_POLL_S)
            member = _Member(config, store, rank, device)
            # torchrun sends signals to every process; the lead finishes its step first, and saves.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            _follow(member)

    def make(self, factory: Factory[T], *arguments: Any) -> T:
        """Makes every rank's object with `factory(ranks, *arguments)`; returns the lead's.

        `factory` must be importable, the arguments picklable. Raises what every rank raises, or RankError.
        """
        return self._call((factory, arguments, True))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function(object, *arguments)` on every rank; returns the lead's result.

        `function` must be importable (as a class's method is). Raises as `make`.
        """
        return self._call((function, arguments, False))

    def close(self) -> None:
        """Ends the other ranks. Idempotent."""
        if not self._broken:
            self._broken = True
            self._member.announce(_CLOSE)
            _end(self._processes, at_once=False)
            dist.destroy_process_group()

    def _call(self, command: _Command) -> Any:
        if self._broken:
            raise RankError("all ranks have ended", field="parallel", fix="start again with --resume")
        try:
            with _group_errors(self._processes):
                self._member.announce(_GO)
                dist.broadcast_object_list([command], src=0, device=_CPU)
                result, error = self._run(command)
                within_s = self._member.config.timeout_s if error is None else _GRACE_S
                others = [
                    self._member.outcome_of(rank, within_s, self._processes)
                    for rank in range(1, self._member.config.ranks)
                ]
        except BaseException:
            self._break()
            raise
        failures = [other for other in others if other is not None]
        if error is None and not failures:
            return result
        if error is not None and all(type(other) is type(error) for other in others):
            raise error
        self._break()
        first = error or failures[0]
        raise RankError(f"a rank failed where others did not: {first!r}", field="parallel") from first

    def _run(self, command: _Command) -> tuple[Any, EtudeError | None]:
        """Executes the command on the lead. Only an EtudeError may be one that all ranks raise alike; any
        other exception ends the team."""
        try:
            return self._member.run(command), None
        except RankError:
            raise
        except EtudeError as error:
            return None, error

    def _break(self) -> None:
        self._broken = True
        _end(self._processes, at_once=True)
        dist.destroy_process_group()


@contextlib.contextmanager
def _stops_are_for_the_lead() -> Iterator[None]:
    """Blocks Ctrl-C and SIGTERM in processes started within it, the fork server included: both may be sent to
    a whole process group, but the lead finishes a step first. The mask is inherited, handlers are not."""
    resource_tracker.ensure_running()  # starting it unblocks both signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawned(config: ParallelConfig, port: int, rank: int, device: str, num_threads: int) -> None:
    """The main function of a spawned rank."""
    torch.set_num_threads(num_threads)
    _stay_on_loopback()
    # The lead reports the error: it notices that this process ended.
    with contextlib.suppress(RankError), _group_errors([]):
        store = TCPStore("127.0.0.1", port, is_master=False)
        _follow(_Member(config, store, rank, device))


def _loopback_store() -> tuple[Store, int]:
    """A store and its port, on loopback only: by default it listens on all interfaces, and the ranks unpickle
    what it holds."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    # The store closes the descriptor when it ends.
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port


def _stay_on_loopback() -> None:
    """Makes gloo connect the ranks of one machine over loopback, whatever the host's name resolves to."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _follow(member: _Member[Any]) -> None:
    """Executes the lead's commands until it closes. Raises RankError when outcomes differ between ranks."""
    while _next_command(member):
        commands: list[Any] = [None]
        dist.broadcast_object_list(commands, src=0, device=_CPU)
        try:
            member.run(commands[0])
        except EtudeError as error:
            lead_error = member.outcome_of(0, _GRACE_S)
            if type(lead_error) is not type(error):
                raise RankError("failed where the lead did not", field=f"rank {member.rank}") from error


def _next_command(member: _Member[Any]) -> bool:
    """Waits, without a timeout, for the lead's next command; False when it closes the team."""
    member.number += 1
    key = f"{member.number}/next"
    while not member.store.check([key]):
        time.sleep(_POLL_S)
    return member.store.get(key).decode() == _GO


@contextlib.contextmanager
def _group_errors(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Turns errors of a communication library about lost or late ranks into RankError."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, EtudeError) or not _is_network(error):
            raise
        raise lost_rank(_dead(processes, within_s=_DEATH_S) or error) from error


def _is_network(error: Exception) -> bool:
    words = ("gloo", "Connection", "Timed out", "NCCL")
    return isinstance(error, _NETWORK_ERRORS) or any(word in str(error) for word in words)


def _dead(processes: Sequence[BaseProcess], within_s: float = 0.0) -> str:
    """The started ranks that have ended, with exit codes; waits up to `within_s` for one to end."""
    deadline = time.monotonic() + within_s
    while True:
        ended = [f"rank {i + 1} ended with code {p.exitcode}" for i, p in enumerate(processes) if p.exitcode]
        if ended or not processes or time.monotonic() > deadline:
            return ", ".join(ended)
        time.sleep(0.05)


def _end(processes: Sequence[BaseProcess], *, at_once: bool) -> None:
    """Waits for started ranks to end; kills those that do not."""
    for process in processes:
        process.join(0.0 if at_once else _GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # an error of other code that cannot be pickled: its text can
        return pickle.dumps(RankError(repr(error)))


def check_world(config: ParallelConfig) -> None:
    """Raises ConfigError where `torchrun` started another number of processes than configured."""
    if _started_by_torchrun() and int(os.environ["WORLD_SIZE"]) != config.ranks:
        raise ConfigError(
            f"must equal the number of processes that torchrun started, {os.environ['WORLD_SIZE']}",
            field="parallel.ranks",
            received=config.ranks,
            fix=f"set --ranks {os.environ['WORLD_SIZE']}",
        )


def is_follower() -> bool:
    """Whether `torchrun` started this process, and not as the first."""
    return _started_by_torchrun() and os.environ["RANK"] != "0"


def _started_by_torchrun() -> bool:
    """Whether `torchrun`, or a launcher that sets the same environment, started this process with others."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1
