"""A borrowed replica as one of a run's engines: a Handle over HTTP.

It has the methods of an engine in a separate process (begin, exchange, poll, stage, activate, score, pulse),
so that samplers use it like any other engine.
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
from etude.kit.tasks import Tasks, explain_cancelled_call
from etude.protocols import Handle
from etude.serving.client import Answer, Client, NoAnswerError, error_in
from etude.serving.errors import decode_error

_CONNECT_S = 5.0
_SILENT_S = 30.0
"""Timeout of calls that should return at once; three times as long as an empty poll waits."""
_END_S = 5.0
_GONE, _FAILED = 410, 422
_UNBOUNDED = ("stage", "activate", "score")
_CLIENT_AT = {"exchange": 1, "poll": 0}
"""Index of the client's name among the arguments; if missing or empty, it is this handle's own."""
_RENEWALS = 3.0
"""Renewals per lease time."""


class LoanEndedError(PartLostError):
    """The replica was recalled."""


class LoanHandle(Handle[Any]):
    """Use within one event loop; a pickled copy is a separate client.

    From `begin` on it renews the loan, until `stop` or `kill`. No process is ever started on its machine.
    """

    def __init__(self, url: str, token: str, store: str) -> None:
        """`url`: of the replica. `token`: of the loan. `store`: URL of the run's weight store."""
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
        """Pickles the address only, without calls in progress."""
        return LoanHandle, (self.url, self._token, self._store)

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See Handle.send. Raises LoanEndedError once the replica was recalled."""
        self._check_kept()
        task = self._calls.start(self._do(method, *arguments, **named))
        try:
            with explain_cancelled_call(self._check_kept):
                return await task
        finally:
            task.cancel()

    def _check_kept(self) -> None:
        if self._dead:
            raise PartLostError("the loan was ended", field=self.url)

    async def stop(self) -> None:
        """See Handle.stop: ends the loan, if the replica answers."""
        if not self._dead:
            with contextlib.suppress(InfrastructureError, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._do("end")
        self.kill()
        if self._closing is not None:
            await self._closing

    def kill(self) -> None:
        """See Handle.kill: stops renewing the loan, so that the replica returns by itself."""
        self._dead = True
        if self._renewing is not None:
            self._renewing.cancel()
        self._calls.cancel()
        if self._http.is_open:
            self._closing = asyncio.ensure_future(self._http.close())

    # ---- HTTP -----------------------------------------------------------------------------------

    async def _do(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """Calls a method of the replica's `LoanDesk`. Calls without a time limit are ended by `kill`."""
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
            # Failures surface at the next call. An unanswered renewal must not delay the next one.
            with contextlib.suppress(EtudeError):
                await self._do("pulse", within_s=every_s)

    def _refusal(self, answer: Answer) -> Exception:
        found = error_in(answer)
        if answer.status_code == _FAILED and "kind" in found:
            return decode_error(found, otherwise=SamplerError)
        if answer.status_code == _GONE:
            return LoanEndedError("the replica was recalled", field=self.url)
        received = f"{answer.status_code} {answer.text[:300]}"
        return SamplerError("a borrowed replica refused the call", field=self.url, received=received)
