"""The ranks as a team: the first one leads, the others do the same at the same time.

    lead     call(function) ── announce ──> compute ── collect outcomes ──> answer
    others   wait ──────────── receive  ──> compute ── report, wait again

The first rank is the process that runs everything else: rollouts, logs, checkpoints. The others hold one
object each, made by the same factory, and do nothing but call its methods when the lead does. What a method
raises on every rank alike (bad input) is raised to the caller, and the team goes on. Anything else leaves
ranks in different places: the team ends, on every rank, with RankError. A rank that dies closes its
connections, so those that wait for it fail at once; one that hangs is given up after `parallel.timeout_s`.

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
from dataclasses import dataclass
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
from etude.training.parallel.mesh import Mesh

T = TypeVar("T")

TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public, if not by its own __all__)

_CPU = torch.device("cpu")
_POLL_S = 0.02
_DEATH_S = 2.0
"""How long it may take to see that a process has ended, once its connections have."""
_START_S = 600.0
"""How long ranks may take to start."""
_GRACE_S = 15.0
"""How long a rank that failed waits to hear that all did, before it ends and so wakes those that wait."""
_LEAD, _GO, _CLOSE = "lead", "go", "close"
_OK = b""
_NETWORK_ERRORS = (dist.DistError, ConnectionError)
Factory = Callable[..., T]
"""Called on every rank with its MeshRanks and the team's arguments."""


@dataclass(frozen=True, slots=True)
class _Command:
    """One thing that every rank does. `function` gets the rank's object, or, to make one, its MeshRanks."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    makes: bool


class _Seat(Generic[T]):
    """What the lead and the others have in common: a place in the group, and an object."""

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
        self._assemble(processes)
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
        self.held: T | None = None
        self.number = 0

    def _assemble(self, processes: Sequence[BaseProcess]) -> None:
        """Waits until all ranks are up: that takes as long as imports do, and is no measure of a step."""
        self.store.set(f"here/{self.rank}", "")
        for rank in range(self.config.ranks):
            self.wait_for(f"here/{rank}", rank, _START_S, processes)

    def announce(self, what: str) -> None:
        """The lead's word that something comes next. What was said of the command before the last one is
        forgotten: every rank has answered for the last one since, so nobody reads it any more."""
        self.number += 1
        self.store.set(f"{self.number}/next", what)
        if self.number > 2:
            for name in ("next", *range(self.config.ranks)):
                self.store.delete_key(f"{self.number - 2}/{name}")

    def run(self, command: _Command) -> Any:
        """Does what the command says, and tells the others how it went."""
        outcome = pickle.dumps(RankError("ended in the middle of a step", field=f"rank {self.rank}"))
        try:
            result = command.function(self.ranks if command.makes else self.held, *command.arguments)
            if command.makes:
                self.held = result
            outcome = _OK
        except Exception as error:
            outcome = _pickled(error)
            raise
        finally:
            with contextlib.suppress(*_NETWORK_ERRORS):  # the lead is gone: nobody is left to notify
                self.store.set(f"{self.number}/{self.rank}", cast(str, outcome))  # bytes are as good
        return result

    def outcome_of(
        self, rank: int, within_s: float, processes: Sequence[BaseProcess] = ()
    ) -> Exception | None:
        """What `rank` raised in the current command. Raises RankError if it does not say in time, or if one
        of `processes` has died."""
        key = f"{self.number}/{rank}"
        self.wait_for(key, rank, within_s, processes)
        stored = self.store.get(key)
        return pickle.loads(stored) if stored else None

    def wait_for(self, key: str, rank: int, within_s: float, processes: Sequence[BaseProcess]) -> None:
        """Waits until `rank` has said `key`. Raises RankError as `outcome_of`."""
        deadline = time.monotonic() + within_s
        while not self.store.check([key]):  # its own wait would print a warning each time
            dead = _dead(processes)
            if dead or time.monotonic() > deadline:
                raise RankError(dead or f"said nothing for {within_s:.0f} s", field=f"rank {rank}")
            time.sleep(_POLL_S)


class Team(Generic[T]):
    """The lead's side. Not thread-safe: one call at a time, as from a loop."""

    def __init__(self, seat: _Seat[T], processes: list[BaseProcess]) -> None:
        self._seat = seat
        self._processes = processes
        self._broken = False

    @staticmethod
    def spawn(config: ParallelConfig, device: str = "cpu", num_threads: int = 1) -> Team[Any]:
        """Starts the other ranks on this machine; `num_threads`: compute threads of each.

        Raises RankError if they do not come up.
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
                return Team(_Seat(config, store, 0, device, processes), processes)
        except RankError:
            _end(processes, at_once=True)
            raise

    @staticmethod
    def join(config: ParallelConfig, device: str = "cpu") -> Team[Any] | None:
        """Leads the processes that `torchrun` started; None if it did not start this one.

        Raises RankError if the others do not come, ConfigError as `check_world`.
        """
        check_world(config)
        if not _started_by_torchrun():
            return None
        with _group_errors([]):
            store, rank, _ = next(iter(rendezvous("env://")))
            store.set(_LEAD, "")
            return Team(_Seat(config, store, rank, device), [])

    @staticmethod
    def follow(config: ParallelConfig, device: str = "cpu") -> None:
        """Follows the first of the processes that `torchrun` started, until it closes its team. Waits for it
        as long as it takes. Raises RankError if others fail."""
        with _group_errors([]):
            store, rank, _ = next(iter(rendezvous("env://")))
            while not store.check([_LEAD]):
                time.sleep(_POLL_S)
            seat = _Seat(config, store, rank, device)
            # torchrun hands what stops a run to every process; the lead ends a step first, and saves.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            _follow(seat)

    def make(self, factory: Factory[T], *arguments: Any) -> T:
        """Every rank makes its object: `factory(ranks, *arguments)`. Returns the lead's.

        `factory` is importable, the arguments can be pickled. Raises what every rank raises, and RankError.
        """
        return self._call(_Command(factory, arguments, makes=True))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Every rank calls `function(object, *arguments)`; returns what it returns on the lead.

        `function` is importable (a method of a class is). Raises what every rank raises, and RankError.
        """
        return self._call(_Command(function, arguments, makes=False))

    def close(self) -> None:
        """Lets the other ranks go. Idempotent."""
        if not self._broken:
            self._broken = True
            self._seat.announce(_CLOSE)
            _end(self._processes, at_once=False)
            dist.destroy_process_group()

    def _call(self, command: _Command) -> Any:
        if self._broken:
            raise RankError("the team has ended", field="parallel", fix="start the run again with --resume")
        try:
            with _group_errors(self._processes):
                self._seat.announce(_GO)
                dist.broadcast_object_list([command], src=0, device=_CPU)
                result, error = self._run(command)
                within_s = self._seat.config.timeout_s if error is None else _GRACE_S
                others = [
                    self._seat.outcome_of(rank, within_s, self._processes)
                    for rank in range(1, self._seat.config.ranks)
                ]
        except BaseException:
            self._break()
            raise
        failures = [one for one in others if one is not None]
        if error is None and not failures:
            return result
        if error is not None and all(type(one) is type(error) for one in others):
            raise error
        self._break()
        first = error or failures[0]
        raise RankError(f"a rank failed where others did not: {first!r}", field="parallel") from first

    def _run(self, command: _Command) -> tuple[Any, EtudeError | None]:
        """The lead's own part. Only our own errors may be everyone's; others end the team."""
        try:
            return self._seat.run(command), None
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
    """Processes that are started meanwhile, the fork server among them, never see Ctrl-C or SIGTERM, which
    may go to all of a process group: the lead ends a step first. The mask is inherited, handlers are not."""
    resource_tracker.ensure_running()  # starting it unblocks both signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawned(config: ParallelConfig, port: int, rank: int, device: str, num_threads: int) -> None:
    """A started rank's whole life."""
    torch.set_num_threads(num_threads)
    _stay_on_loopback()
    # The lead says what happened: it sees this process end.
    with contextlib.suppress(RankError), _group_errors([]):
        store = TCPStore("127.0.0.1", port, is_master=False)
        _follow(_Seat(config, store, rank, device))


def _loopback_store() -> tuple[Store, int]:
    """A store and its port, on loopback alone: left to itself it listens everywhere, and what ranks tell each
    other is unpickled."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    # The store closes the descriptor in the end.
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port


def _stay_on_loopback() -> None:
    """Lets gloo connect the ranks of one machine over loopback, whatever the host's name resolves to."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _follow(seat: _Seat[Any]) -> None:
    """Does what the lead does until it closes. Raises RankError when ranks no longer go together."""
    while _next_command(seat):
        commands: list[Any] = [None]
        dist.broadcast_object_list(commands, src=0, device=_CPU)
        try:
            seat.run(commands[0])
        except EtudeError as error:
            leads = seat.outcome_of(0, _GRACE_S)
            if type(leads) is not type(error):
                raise RankError("failed where the lead did not", field=f"rank {seat.rank}") from error


def _next_command(seat: _Seat[Any]) -> bool:
    """Waits, for as long as it takes, for the lead to do something; False when it closes."""
    seat.number += 1
    key = f"{seat.number}/next"
    while not seat.store.check([key]):
        time.sleep(_POLL_S)
    return seat.store.get(key).decode() == _GO


@contextlib.contextmanager
def _group_errors(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Raises RankError for what a communication library raises when others are gone or late."""
    try:
        yield
    except (RuntimeError, ConnectionError) as error:
        if isinstance(error, EtudeError) or not _is_network(error):
            raise
        dead = _dead(processes, within_s=_DEATH_S)
        raise RankError(
            f"a rank is gone or too late: {dead or error}",
            field="parallel",
            fix="see its messages above, then go on from the last checkpoint with --resume",
        ) from error


def _is_network(error: Exception) -> bool:
    words = ("gloo", "Connection", "Timed out", "NCCL")
    return isinstance(error, _NETWORK_ERRORS) or any(word in str(error) for word in words)


def _dead(processes: Sequence[BaseProcess], within_s: float = 0.0) -> str:
    """Which started ranks have ended, and how; waits a little for one to do so."""
    deadline = time.monotonic() + within_s
    while True:
        ended = [f"rank {i + 1} ended with code {p.exitcode}" for i, p in enumerate(processes) if p.exitcode]
        if ended or not processes or time.monotonic() > deadline:
            return ", ".join(ended)
        time.sleep(0.05)


def _end(processes: Sequence[BaseProcess], *, at_once: bool) -> None:
    """Waits for started ranks to end; ends those that do not."""
    for process in processes:
        process.join(0.0 if at_once else _GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # an error of somebody's that cannot travel: its words can
        return pickle.dumps(RankError(repr(error)))


def check_world(config: ParallelConfig) -> None:
    """Raises ConfigError where `torchrun` started another number of processes than configured."""
    if _started_by_torchrun() and int(os.environ["WORLD_SIZE"]) != config.ranks:
        raise ConfigError(
            f"is not the number of processes that torchrun started, which is {os.environ['WORLD_SIZE']}",
            field="parallel.ranks",
            received=config.ranks,
            fix=f"--ranks {os.environ['WORLD_SIZE']}",
        )


def is_follower() -> bool:
    """Whether `torchrun` started this process, and not as the first."""
    return _started_by_torchrun() and os.environ["RANK"] != "0"


def _started_by_torchrun() -> bool:
    """Whether `torchrun`, or anything that speaks its environment, started this process among others."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1
