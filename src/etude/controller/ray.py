"""The Ray executor: every part is an actor, a process of its own, here or on another machine of a cluster.

Ray's own restarts are off: only the supervisor knows how to restore the state of a new process (see
`supervision`). An actor runs asynchronous methods of its part in its event loop, so that it answers while
others wait, and all other methods one after another in a single compute thread.

Import it through `open_executor`, which first sets the environment that Ray reads when it is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from etude.config import ClusterConfig
from etude.controller.ray_checks import bundle_of, check_address, check_room, describe_parts
from etude.errors import EtudeError, PartLostError, ResourceError
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.protocols import Handle, Resources

T = TypeVar("T")

DOMAIN_LABEL = "etude-domain"
"""Label of machines (`ray start --labels etude-domain=a`) that `failure_domain` selects."""
_NODE_LABEL = "ray.io/node-id"
_TITLE = "etude-"
"""Prefix of the titles of parts' processes, after Ray's own `ray::`."""
_MANY = 10_000
"""Limit of concurrent calls: an engine has one for every client, and few others."""
_LONGEST_WORDS = 500
"""Limit of an error's description, in characters."""
_SCRATCH = "ray-etude-"
"""Prefix of the names of Ray's directories."""
_GRACE_S = 10.0
"""How long a part may take to close what it has opened."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A method's return value or error."""

    value: Any = None
    error: Exception | None = None
    trace: str = ""

    def result(self) -> Any:
        if self.error is None:
            return self.value
        if self.trace:
            self.error.add_note(f"in the part's process:\n{self.trace}")
        raise self.error


class _PartActor:
    """One part, in an actor's process."""

    def __init__(self) -> None:
        self._part: Any = None
        self._thread = ThreadPoolExecutor(1, "part")

    async def make(
        self, factory: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> _Outcome:
        """Makes the part; returns its machine and process id."""
        node = ray.get_runtime_context().get_node_id()

        def work() -> tuple[str, int]:
            self._part = factory(*arguments, **named)
            return node, os.getpid()

        return await self._outcome_of(self._in_thread(work))

    async def call(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> _Outcome:
        """Calls the part's method."""
        function = getattr(self._part, method)
        if inspect.iscoroutinefunction(function):
            return await self._outcome_of(function(*arguments, **named))
        return await self._outcome_of(self._in_thread(lambda: function(*arguments, **named)))

    async def close(self) -> None:
        """Closes the part, if it can be closed."""
        if hasattr(self._part, "close"):
            await self.call("close", (), {})

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _outcome_of(self, work: Any) -> _Outcome:
        try:
            return _Outcome(await work)
        except EtudeError as error:
            return _Outcome(error=error)
        except Exception as error:
            trace = traceback.format_exc()
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # an error that cannot be pickled: its description can
                error = RuntimeError(repr(error))
            return _Outcome(error=error, trace=trace)


class RayHandle(Handle[T]):
    """A Handle of a part in an actor. May be sent to other actors, which then call the part too."""

    def __init__(self, actor: Any, name: str, node: str, pid: int) -> None:
        """`node`: the machine, empty for the driver's. `pid`: of the actor's process there."""
        self.node = node
        self.pid = pid
        self.name = name
        self._actor = actor
        self._ended = False

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        try:
            outcome = await self._actor.call.remote(method, arguments, named)
        except RayError as error:
            raise PartLostError(describe_ray_error(error), field=self.name) from error
        return outcome.result()

    async def stop(self) -> None:
        if self._ended:
            return
        with contextlib.suppress(RayError, TimeoutError):  # it is ended in any case
            async with asyncio.timeout(_GRACE_S):
                await self._actor.close.remote()
                ray.kill(self._actor, no_restart=True)
                self._ended = True
        self.kill()

    def kill(self) -> None:
        if self._ended or not ray.is_initialized():
            return
        self._ended = True
        ray.kill(self._actor, no_restart=True)
        if not self.node and _title(self.pid).startswith(f"ray::{_TITLE}"):
            # Ray asks the process to end, to which a process that hangs or is stopped does not react.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class RayExecutor:
    """Starts parts as Ray actors. A context manager: connects to Ray, or starts it, on entry."""

    def __init__(self, settings: ClusterConfig, num_cpus: int | None = None) -> None:
        """`num_cpus`: number of cores given to a Ray started here; None: those of this machine."""
        self._settings = settings
        self._num_cpus = num_cpus
        self._handles: list[RayHandle[Any]] = []
        self._bundles: dict[str, int] = {}
        self._group: PlacementGroup | None = None
        self._rooms: dict[str, PlacementGroup] = {}
        """Placement groups of parts that `make_room` added, by name."""
        self._scratch = contextlib.ExitStack()

    def __enter__(self) -> RayExecutor:
        settings = self._settings
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        with _signals_kept():
            if settings.address:
                check_address(settings)
                ray.init(address=settings.address, **quiet)
                return self
            root = Path(tempfile.gettempdir())
            sweep(root, _SCRATCH)  # leftovers of killed runs
            directory = self._scratch.enter_context(ScratchDirectory(root, _SCRATCH))
            try:
                ray.init(
                    num_cpus=self._num_cpus,
                    include_dashboard=False,
                    object_store_memory=settings.object_store_bytes,
                    _temp_dir=str(directory),
                    **quiet,
                )
            except BaseException:  # __exit__ is not called where __enter__ raises
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        for part in list(self._rooms):
            self.release_room(part)
        if self._group is not None:
            _remove(self._group)
        ray.shutdown()
        self._scratch.close()

    async def reserve(self, parts: Sequence[Resources]) -> None:
        """Reserves the resources of all parts at once, so that none of them waits for another's.

        Raises ResourceError where the machines do not have them.
        """
        check_room(parts, ray.cluster_resources())
        self._bundles = {part.part: number for number, part in enumerate(parts)}
        self._group = placement_group(
            [bundle_of(part) for part in parts],
            strategy=self._settings.placement.upper(),
            bundle_label_selector=[_labels(part) for part in parts],
        )
        try:
            async with asyncio.timeout(self._settings.placement_timeout_s):
                await self._group.ready()
        except TimeoutError:
            raise ResourceError(
                "Ray has too few resources for all parts at once: " + describe_parts(parts),
                field="cluster.placement",
                received=self._settings.placement,
                fix=f"start more machines, or request less in [cluster]; Ray has {_available()}",
            ) from None

    async def make_room(self, part: Resources) -> None:
        """Reserves the resources of one more part, and waits for them, possibly until a machine joins;
        returns at once where `reserve` has. Raises PartLostError where Ray fails."""
        if part.part in self._bundles:
            return
        if part.part not in self._rooms:
            self._rooms[part.part] = placement_group([bundle_of(part)], bundle_label_selector=[_labels(part)])
        try:
            await self._rooms[part.part].ready()  # waits again after its machine was lost
        except RayError as error:
            raise PartLostError(f"cannot be placed: {describe_ray_error(error)}", field=part.part) from error

    def release_room(self, part: str) -> None:
        """Releases what `make_room` reserved or waits for; does nothing for other parts."""
        group = self._rooms.pop(part, None)
        if group is not None:
            _remove(group)

    async def spawn(
        self, factory: Callable[..., T], *arguments: Any, resources: Resources | None = None, **named: Any
    ) -> RayHandle[T]:
        """See Executor.spawn. `factory` must be importable in the actor's process.

        Raises PartLostError if the process does not come up, and what the factory raises.
        """
        wanted = resources or Resources()
        name = wanted.part or getattr(factory, "__name__", "part")
        # The class's name is the process's title. Ray makes its methods, `remote` and all, at run time.
        actor: Any = ray.remote(type(_TITLE + name, (_PartActor,), {}))
        actor = actor.options(**self._options(wanted)).remote()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                outcome = await actor.make.remote(factory, arguments, named)
            node, pid = outcome.result()
        except BaseException as error:
            ray.kill(actor, no_restart=True)
            if isinstance(error, TimeoutError):
                raise PartLostError(
                    f"did not start within {self._settings.start_timeout_s:.0f} s",
                    field=name,
                    received=describe_parts([wanted]),
                    fix=f"raise cluster.start_timeout_s; Ray has {_available()} free",
                ) from None
            if isinstance(error, RayError):
                raise PartLostError(f"did not start: {describe_ray_error(error)}", field=name) from error
            raise
        here = ray.get_runtime_context().get_node_id()
        handle = RayHandle[T](actor, name, "" if node == here else node, pid)
        self._handles.append(handle)
        return handle

    async def shutdown(self) -> None:
        """See Executor.shutdown: last made, first stopped."""
        while self._handles:
            await self._handles.pop().stop()

    def _options(self, wanted: Resources) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_cpus": wanted.num_cpus,
            "num_gpus": wanted.num_gpus,
            "max_concurrency": _MANY,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if wanted.memory_bytes:
            options["memory"] = wanted.memory_bytes
        room = self._rooms.get(wanted.part)
        bundle = self._bundles.get(wanted.part)
        up = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        avoid = wanted.avoid & up
        if avoid and avoid != up:
            # Its reservation may be on such a machine: it must run on another one.
            nodes = ",".join(sorted(avoid))
            return options | {"label_selector": {**_labels(wanted), _NODE_LABEL: f"!in({nodes})"}}
        if room is not None:
            return options | {"scheduling_strategy": PlacementGroupSchedulingStrategy(room, 0)}
        if self._group is not None and bundle is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            return options | {"scheduling_strategy": strategy}
        return options | {"label_selector": _labels(wanted)}


def _labels(wanted: Resources) -> dict[str, str]:
    return {DOMAIN_LABEL: wanted.failure_domain} if wanted.failure_domain else {}


def _remove(group: PlacementGroup) -> None:
    with contextlib.suppress(RayError):  # Ray has ended, and its reservations with it
        remove_placement_group(group)


def _available() -> str:
    return json.dumps({k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU", "memory")})


def _title(pid: int) -> str:
    """Title of a process of this machine; empty once it has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def describe_ray_error(error: RayError) -> str:
    """Describes an error in one line: the cause of an error in a process, or what Ray knows of a process that
    died, without the names and numbers that Ray adds."""
    cause: BaseException = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
        cause = cause.cause
    words = " ".join(line for line in str(cause).strip().splitlines() if not line.startswith(("\t", " ")))
    if len(words) > _LONGEST_WORDS:
        words = f"{words[:_LONGEST_WORDS]}..."
    return f"{type(cause).__name__}: {words or 'no message'}"


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restores the run's own SIGTERM handler, which Ray replaces."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread: Ray has not replaced it either
            signal.signal(signal.SIGTERM, before)
