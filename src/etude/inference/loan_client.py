"""A replica that is lent to a run, as the run's engine: a Handle over HTTP.

It answers what an engine in a process of its own does (begin, exchange, poll, stage, activate, score, pulse),
so that to those who sample it is one engine more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Mapping
from typing import Any

from etude.errors import EtudeError, InfrastructureError, PartLostError, SamplerError
from etude.inference import wire
from etude.kit.tasks import Tasks, ended_by_others
from etude.protocols import Handle
from etude.serving.client import Answer, Client, NoAnswerError, error_in
from etude.serving.errors import decode_error

_CONNECT_S = 5.0
_SILENT_S = 30.0
"""Of a call that should take no time; three times as long as an empty poll waits."""
_END_S = 5.0
_GONE, _FAILED = 410, 422
_UNBOUNDED = ("stage", "activate", "score")
_CLIENT_AT = {"exchange": 1, "poll": 0}
"""Place of the client's name among the arguments; without one, or an empty one, it is this handle's own."""
_RENEWALS = 3.0
"""In the time of a lease."""


class LoanEndedError(PartLostError):
    """The replica was called home."""


class LoanHandle(Handle[Any]):
    """Use within one event loop; a copy that is pickled is a client of its own.

    `begin` keeps the loan alive from then on, until `stop` or `kill`. Nothing is ever started on its machine.
    """

    def __init__(self, url: str, token: str, store: str) -> None:
        """`url`: of the replica. `token`: of the loan. `store`: where it finds the run's weights."""
        self.url = url.rstrip("/")
        self._token = token
        self._store = store
        self._name = uuid.uuid4().hex[:16]
        self._http = Client(url, token, connect_s=_CONNECT_S, refusal=self._refusal)
        self._calls = Tasks()
        self._renewing: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self._dead = False

    def __reduce__(self) -> tuple[object, ...]:
        """Where it is, and nothing of what is under way."""
        return LoanHandle, (self.url, self._token, self._store)

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See Handle.send. Raises LoanEndedError once the replica was called home."""
        self._check_kept()
        task = self._calls.start(self._do(method, *arguments, **named))
        try:
            with ended_by_others(self._check_kept):
                return await task
        finally:
            task.cancel()

    def _check_kept(self) -> None:
        if self._dead:
            raise PartLostError("was let go", field=self.url)

    async def stop(self) -> None:
        """See Handle.stop: gives the replica back, if it answers."""
        if not self._dead:
            with contextlib.suppress(InfrastructureError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._do("end")
        self.kill()
        if self._closing is not None:
            await self._closing

    def kill(self) -> None:
        """See Handle.kill: the loan is not renewed, so that the replica goes home by itself."""
        self._dead = True
        if self._renewing is not None:
            self._renewing.cancel()
        self._calls.cancel()
        if self._http.is_open:
            self._closing = asyncio.ensure_future(self._http.close())

    # ---- HTTP -----------------------------------------------------------------------------------

    async def _do(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Calls a method of the replica's; see `LoanDesk`. Those that may take as long as they like are given
        up by `kill`."""
        if method == "begin":
            arguments = (self._store,)
        elif method in _CLIENT_AT and not any(arguments[_CLIENT_AT[method] :]):
            arguments = (*arguments[: _CLIENT_AT[method]], self._name)
        if within_s is None:
            within_s = math.inf if method in _UNBOUNDED else _SILENT_S
        try:
            answer = await self._http.request(
                "POST", f"/loan/{method}", content=wire.pack(list(arguments)), within_s=within_s
            )
        except NoAnswerError as error:
            raise PartLostError(
                "a borrowed replica does not answer", field=self.url, received=error.message
            ) from error
        result = wire.unpack(answer.content)
        if method == "begin" and self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(result["lease_s"] / _RENEWALS))
        return result

    async def _renew(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            # The next call learns of it. One that is not answered must not keep the next back.
            with contextlib.suppress(EtudeError):
                await self._do("pulse", within_s=every_s)

    def _refusal(self, answer: Answer) -> Exception:
        found = error_in(answer)
        if answer.status_code == _FAILED and "kind" in found:
            return decode_error(found, otherwise=SamplerError)
        if answer.status_code == _GONE:
            return LoanEndedError("the replica was called home", field=self.url)
        received = f"{answer.status_code} {answer.text[:300]}"
        return SamplerError("a borrowed replica refuses", field=self.url, received=received)
