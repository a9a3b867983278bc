"""A replica that is lent to a run, as the run's engine: a Handle over HTTP.

It answers what an engine in a process of its own does (begin, exchange, poll, stage, activate, score, pulse),
so that to those who sample it is one engine more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from etude.errors import EtudeError, InfrastructureError, PartLostError, SamplerError
from etude.inference import wire
from etude.inference.exchange import Command, Event
from etude.inference.headers import CLIENT_HEADER
from etude.inference.waiting import ended_by_others
from etude.kit.tasks import Tasks
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, Scores, WeightManifest
from etude.serving.client import Answer, Client, NoAnswerError, Request, error_in
from etude.serving.errors import decode_error
from etude.weights.documents import manifest_document, version_document

_CONNECT_S = 5.0
_SILENT_S = 30.0
"""Of a call that should take no time; three times as long as an empty poll waits."""
_END_S = 5.0
_GONE, _FAILED = 410, 422
_RENEWALS = 3.0
"""In the time of a lease."""


class LoanEndedError(PartLostError):
    """The replica was called home."""


class LoanHandle:
    """Implements Handle. Use within one event loop; a copy that is pickled is a client of its own.

    `begin` keeps the loan alive from then on, until `stop` or `kill`.
    """

    node = ""
    """See Handle.node. No machine of the run's: nothing is ever started there."""

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

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """See Handle.call. Raises LoanEndedError once the replica was called home."""
        self._check_kept()
        task = self._calls.start(getattr(self, f"_{method}")(*arguments, **named))
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
                    await self._end()
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

    # ---- what can be called ---------------------------------------------------------------------

    async def _begin(self) -> dict[str, Any]:
        """What the engine is: see `LoanDesk.begin`."""
        about = await self._ask_json("begin", {"store": self._store})
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(about["lease_s"] / _RENEWALS))
        return about

    async def _exchange(self, commands: Sequence[Command], client: str = "") -> None:
        await self._ask("exchange", wire.pack_commands(commands), client=client)

    async def _poll(self, client: str = "") -> list[Event]:
        return wire.unpack_events((await self._ask("poll", b"", client=client)).content)

    async def _forget(self, client: str) -> None:
        await self._ask("forget", b"", client=client)

    async def _stage(self, manifest: WeightManifest) -> None:
        # As long as it takes: whoever waits gives it up by `kill`.
        await self._ask_json("stage", {"manifest": manifest_document(manifest)}, within_s=math.inf)

    async def _activate(self, version: PolicyVersion, kv: KvPolicy) -> dict[str, float]:
        return await self._ask_json(
            "activate", {"version": version_document(version), "kv": kv}, within_s=math.inf
        )

    async def _score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        answer = await self._ask("score", wire.pack_question(tokens, version), within_s=math.inf)
        return wire.unpack_scores(answer.content)

    async def _pulse(self) -> dict[str, float]:
        return await self._ask_json("pulse", {})

    async def _end(self) -> None:
        await self._ask("end", b"")

    async def _renew(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            # Whoever calls next learns of it. One that is not answered must not keep the next back.
            with contextlib.suppress(EtudeError):
                await self._ask_json("pulse", {}, within_s=every_s)

    # ---- HTTP -----------------------------------------------------------------------------------

    async def _ask_json(self, what: str, body: dict[str, Any], within_s: float = _SILENT_S) -> Any:
        return self._read(await self._send(what, "", json=body, within_s=within_s))

    async def _ask(self, what: str, body: bytes, within_s: float = _SILENT_S, client: str = "") -> Answer:
        return await self._send(what, client, content=body, within_s=within_s)

    async def _send(self, what: str, client: str, **request: Unpack[Request]) -> Answer:
        request["headers"] = {CLIENT_HEADER: client or self._name}
        try:
            return await self._http.request("POST", f"/loan/{what}", **request)
        except NoAnswerError as error:
            raise PartLostError(
                "a borrowed replica does not answer", field=self.url, received=error.message
            ) from error

    def _refusal(self, answer: Answer) -> Exception:
        found = error_in(answer)
        if answer.status_code == _FAILED and "kind" in found:
            return decode_error(found, otherwise=SamplerError)
        if answer.status_code == _GONE:
            return LoanEndedError("the replica was called home", field=self.url)
        received = f"{answer.status_code} {answer.text[:300]}"
        return SamplerError("a borrowed replica refuses", field=self.url, received=received)

    def _read(self, answer: Answer) -> dict[str, Any]:
        """An answer's JSON. Raises SamplerError where it is none: something in between has answered."""
        try:
            document = answer.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise SamplerError(
                "a borrowed replica does not answer with JSON", field=self.url, received=answer.text[:300]
            )
        return document
