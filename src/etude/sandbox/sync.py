"""The sandbox interface for code without an event loop: every call blocks until it is done.

    with SyncSandbox.create("local", Template({"main.py": "print(1)"})) as sandbox:
        print(sandbox.commands.run("python3 main.py").stdout)

A thread of its own runs the asynchronous objects. Ctrl-C cancels the call that is waited for (the
command in the sandbox ends) and is then raised. `on_output` is called in that thread, and may not call
the sandbox itself.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from etude.errors import SandboxError
from etude.kit.tasks import end_tasks
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import Command, Commands, Files, Sandbox, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Capabilities, Network, Resources

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]

_CANCEL_S = 30.0
"""How long a cancelled call may take to clean up before Ctrl-C is raised."""


class LoopThread:
    """An event loop in a thread of its own, until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etude-sandbox", daemon=True)
        self._thread.start()

    def run(self, call: Awaitable[T]) -> T:
        """The result of an awaitable. A caller who is interrupted cancels it, and waits for its end."""
        if threading.current_thread() is self._thread:
            _discard(call)
            raise SandboxError(
                "a blocking call in the thread that would do its work",
                field="on_output",
                fix="let on_output put the bytes aside, and call the sandbox elsewhere",
            )
        result: Future[T] = Future()
        tasks: list[asyncio.Future[T]] = []

        def begin() -> None:
            task = asyncio.ensure_future(call)
            tasks.append(task)
            task.add_done_callback(lambda task: _hand_over(task, result))

        def end() -> None:
            for task in tasks:
                task.cancel()
            if not tasks:  # interrupted before it was handed over
                _discard(call)
                result.set_exception(asyncio.CancelledError())

        try:
            self._hand_in(begin, call)
            return result.result()
        except BaseException:
            if not result.done() and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(end)
                wait([result], _CANCEL_S)
            raise

    def _hand_in(self, begin: Callable[[], None], call: Awaitable[object]) -> None:
        """Has the thread begin a call. Raises SandboxError where it has ended."""
        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError as error:
            _discard(call)
            raise SandboxError("it is closed", field="sandbox.backend", fix="open another one") from error

    def close(self) -> None:
        """Cancels what still runs and ends the thread. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_rest(), self._loop).result(_CANCEL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CANCEL_S)
        self._loop.close()


def _hand_over(task: asyncio.Future[T], result: Future[T]) -> None:
    """The end of a task, for the thread that waits for it."""
    if task.cancelled():
        result.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())


def _discard(call: Awaitable[object]) -> None:
    """Closes a call that will not be made."""
    if asyncio.iscoroutine(call):
        call.close()


async def _cancel_rest() -> None:
    current = asyncio.current_task()
    await end_tasks(*(task for task in asyncio.all_tasks() if task is not current))
    await asyncio.get_running_loop().shutdown_asyncgens()


class Wrapper:
    """An asynchronous object and the thread in which it lives."""

    def __init__(self, wrapped: Any, thread: LoopThread) -> None:
        self.wrapped = wrapped
        self.thread = thread


class blocking(Generic[P, T]):
    """An asynchronous method of the wrapped object, called and waited for. Types and docs are its own.

    `kind`: what wraps its result.
    """

    @overload
    def __init__(self, method: Method[P, T]) -> None: ...
    @overload
    def __init__(self, method: Method[P, Any], kind: Callable[[Any, LoopThread], T]) -> None: ...

    def __init__(self, method: Method[P, Any], kind: Callable[[Any, LoopThread], T] | None = None) -> None:
        self._method = method
        self._kind = kind
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> blocking[P, T]: ...
    @overload
    def __get__(self, instance: Wrapper, owner: type) -> Callable[P, T]: ...

    def __get__(self, instance: Wrapper | None, owner: type) -> blocking[P, T] | Callable[P, T]:
        if instance is None:
            return self
        method = cast("Callable[P, Awaitable[T]]", getattr(instance.wrapped, self._method.__name__))

        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            result = instance.thread.run(method(*args, **kwargs))
            return result if self._kind is None else self._kind(result, instance.thread)

        return call


class SyncFiles(Wrapper):
    """`Files`, blocking."""

    read = blocking(Files.read)
    read_many = blocking(Files.read_many)
    write = blocking(Files.write)
    write_many = blocking(Files.write_many)
    list = blocking(Files.list)
    remove = blocking(Files.remove)
    grep = blocking(Files.grep)
    upload = blocking(Files.upload)
    download = blocking(Files.download)


class SyncCommand(Wrapper):
    """`Command`, blocking."""

    @property
    def pid(self) -> int:
        """See Command."""
        return self.wrapped.pid

    wait = blocking(Command.wait)
    send_stdin = blocking(Command.send_stdin)
    kill = blocking(Command.kill)


class SyncCommands(Wrapper):
    """`Commands`, blocking."""

    run = blocking(Commands.run)
    start = blocking(Commands.start, SyncCommand)
    connect = blocking(Commands.connect, SyncCommand)
    list = blocking(Commands.list)
    send_stdin = blocking(Commands.send_stdin)
    kill = blocking(Commands.kill)


class SyncSandbox(Wrapper):
    """`Sandbox`, blocking. As a context manager it kills the sandbox at the end."""

    def __init__(self, wrapped: Sandbox, thread: LoopThread, owned: SyncBackend | None = None) -> None:
        """`owned`: a backend that was opened for this sandbox alone, and closes with it."""
        super().__init__(wrapped, thread)
        self.files = SyncFiles(wrapped.files, thread)
        self.commands = SyncCommands(wrapped.commands, thread)
        self._owned = owned

    @classmethod
    def create(
        cls,
        backend: str | SyncBackend,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SyncSandbox:
        """A sandbox of a backend, or of a new one of that name, which ends with it."""
        owned = SyncBackend.open(backend) if isinstance(backend, str) else None
        maker = owned or cast(SyncBackend, backend)
        try:
            made = maker.create(template, resources, network, timeout_s, snapshot, metadata)
        except BaseException:
            if owned is not None:
                owned.close()
            raise
        return cls(made.wrapped, maker.thread, owned)

    @property
    def id(self) -> str:
        """See Sandbox."""
        return self.wrapped.id

    call = blocking(Sandbox.call)
    get_info = blocking(Sandbox.get_info)
    set_timeout = blocking(Sandbox.set_timeout)
    create_session = blocking(Sandbox.create_session)
    run_in_session = blocking(Sandbox.run_in_session)
    close_session = blocking(Sandbox.close_session)
    run_tests = blocking(Sandbox.run_tests)
    run_probes = blocking(Sandbox.run_probes)
    diff = blocking(Sandbox.diff)
    final_diff = blocking(Sandbox.final_diff)
    changed_root = blocking(Sandbox.changed_root)
    kinds = blocking(Sandbox.kinds)
    pack = blocking(Sandbox.pack)
    pause = blocking(Sandbox.pause)
    resume = blocking(Sandbox.resume)
    create_snapshot = blocking(Sandbox.create_snapshot)

    def fork(self, count: int = 1) -> list[SyncSandbox | SandboxError]:
        """See Sandbox.fork."""
        copies = self.thread.run(self.wrapped.fork(count))
        return [c if isinstance(c, SandboxError) else SyncSandbox(c, self.thread) for c in copies]

    def migrate(self, target: SyncBackend) -> SyncSandbox:
        """See Sandbox.migrate. The target must live in the same thread: `SyncBackend(make, thread)`."""
        if target.thread is not self.thread:
            raise SandboxError(
                "the target lives in another thread",
                field="target",
                fix="open it with SyncBackend(make, source.thread)",
            )
        return SyncSandbox(self.thread.run(self.wrapped.migrate(target.wrapped)), self.thread)

    def kill(self) -> None:
        """See Sandbox.kill. Closes the backend that was opened for this sandbox alone."""
        if self._owned is not None:
            self._owned.close()
        else:
            self.thread.run(self.wrapped.kill())

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()


class SyncBackend(Wrapper):
    """`SandboxBackend`, blocking. As a context manager it closes at the end."""

    def __init__(self, make: Callable[[], SandboxBackend], thread: LoopThread | None = None) -> None:
        """`make` is called in the thread of the sandboxes; `thread`: share another backend's."""
        self._owns_thread = thread is None
        thread = thread or LoopThread()

        async def made() -> SandboxBackend:
            return make()

        try:
            wrapped = thread.run(made())
        except BaseException:
            if self._owns_thread:
                thread.close()
            raise
        super().__init__(wrapped, thread)
        self._closed = False

    @classmethod
    def open(cls, name: str, state: Path | None = None) -> SyncBackend:
        """A backend by its configured name. Raises ConfigError."""
        return cls(lambda: open_backend(name, state))

    create = blocking(SandboxBackend.create, SyncSandbox)
    connect = blocking(SandboxBackend.connect, SyncSandbox)
    list = blocking(SandboxBackend.list)
    list_snapshots = blocking(SandboxBackend.list_snapshots)
    delete_snapshot = blocking(SandboxBackend.delete_snapshot)
    export_snapshot = blocking(SandboxBackend.export_snapshot)
    import_snapshot = blocking(SandboxBackend.import_snapshot)

    def capabilities(self) -> Capabilities:
        """See SandboxBackend.capabilities."""
        return self.wrapped.capabilities()

    def doctor(self) -> Sequence[str]:
        """See SandboxBackend.doctor."""
        return self.wrapped.doctor()

    def close(self) -> None:
        """See SandboxBackend.close."""
        if self._closed:
            return
        self._closed = True
        try:
            self.thread.run(self.wrapped.close())
        finally:
            if self._owns_thread:
                self.thread.close()

    def __enter__(self) -> SyncBackend:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
