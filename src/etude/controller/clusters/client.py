"""Client of the control API, for clusters: one method per route. See `wire`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar, Unpack

from etude.controller.clusters.board import UnknownMemberError
from etude.errors import ConfigError, InfrastructureError
from etude.kit.retry import Backoff
from etude.kit.tasks import end_tasks
from etude.records import PolicyVersion
from etude.serving.client import (
    Answer,
    Client,
    NoAnswerError,
    Request,
    Transport,
    check_address,
    error_in,
    message_of,
)
from etude.weights.documents import version_document

T = TypeVar("T")

_CONNECT_S = 10.0
_LATE_S = 10.0
"""A long poll is given up this long after it should have been answered."""
_FAREWELL_S = 5.0
_CAUSE_CHARACTERS = 2000
BACKOFF = Backoff(base_s=0.2, most_s=5.0)
"""Between attempts of a request that the run does not answer."""


class ControlLostError(InfrastructureError):
    """The run does not answer: it, or the network to it, may be down for a while."""


class ControlClient:
    """Client of a run's control API. For one event loop; use as an async context manager."""

    def __init__(self, url: str, token: str | None, transport: Transport | None = None) -> None:
        """`transport`: replaces the network. Raises ConfigError for a bad URL."""
        # Requests to an invalid address would only look like a long outage.
        check_address(url, "control")
        self._http = Client(url, token, transport=transport, connect_s=_CONNECT_S, refusal=self._error)
        self.url = self._http.url

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def run(self) -> dict[str, Any]:
        """The run's description."""
        return await self._ask("GET", "/v1/run")

    async def join(self, name: str, api: int, fingerprint: Mapping[str, str]) -> str:
        """Registers this cluster; returns its id. Raises ConfigError where the run refuses it."""
        body = {"name": name, "api": api, "fingerprint": dict(fingerprint)}
        return str((await self._ask("POST", "/v1/join", body))["member"])

    async def beat(
        self,
        member: str,
        version: PolicyVersion | None,
        running: Mapping[str, int],
        trouble: str,
        within_s: float,
    ) -> dict[str, Any]:
        """Sends a heartbeat, answered `within_s`. `trouble`: why new weights do not reach this cluster; empty
        where they do. Raises UnknownMemberError where it must join again."""
        body = {
            "member": member,
            "version": version and version_document(version),
            "running": dict(running),
            "trouble": trouble[:_CAUSE_CHARACTERS],
        }
        return await self._ask("POST", "/v1/beat", body, within_s=within_s)

    async def manifest(self, known: str, wait_s: float) -> dict[str, Any] | None:
        """Manifest of the weights in service, once their version key differs from `known`; None if none comes
        within `wait_s`, the run's own limit."""
        return await self._ask("GET", "/v1/manifest", params={"known": known}, within_s=wait_s + _LATE_S)

    async def claim(
        self, member: str, version: PolicyVersion | None, most: int, wait_s: float
    ) -> dict[str, Any]:
        """Claims sessions. `wait_s`: how long the run may wait for some. Raises UnknownMemberError."""
        body = {"member": member, "version": version and version_document(version), "most": most}
        return await self._ask("POST", "/v1/claim", body, within_s=wait_s + _LATE_S)

    async def send(self, member: str, lease: str, data: bytes | None) -> str:
        """Uploads a finished session; `data` None: it is in the trajectory store. Returns its standing.

        Raises UnknownMemberError; InfrastructureError where the run could not accept it this time.
        """
        path, params = f"/v1/leases/{lease}/session", {"member": member}
        if data is None:
            params["stored"] = "true"
        return str((await self._ask("PUT", path, content=data or b"", params=params))["standing"])

    async def fail(self, member: str, lease: str, cause: str) -> None:
        """Reports a session that could not be run."""
        body = {"member": member, "cause": cause[:_CAUSE_CHARACTERS]}
        await self._ask("POST", f"/v1/leases/{lease}/failure", body)

    async def leave(self, member: str) -> None:
        """Unregisters this cluster; its sessions are leased to others."""
        await self._ask("POST", "/v1/leave", {"member": member}, within_s=_FAREWELL_S)

    async def _ask(self, method: str, path: str, body: object = None, **request: Unpack[Request]) -> Any:
        request["json"] = body
        try:
            return await self._http.ask(method, path, **request)
        except NoAnswerError as error:
            raise ControlLostError(
                f"the run does not answer: {error.message}",
                field="control",
                received=self.url,
                fix="check that the run is running and can be reached from here",
            ) from error

    def _error(self, answer: Answer) -> Exception:
        said, status, message = error_in(answer), answer.status_code, message_of(answer)
        field, fix = said.get("field"), said.get("fix")
        if status == 401 and field == "token":
            return ConfigError(
                "the run requires a token, and received none or a wrong one",
                field="token",
                received=self.url,
                fix="give the run's token with --token file:PATH or env:NAME",
            )
        if status == 410:
            return UnknownMemberError(message, field="member", fix=fix)
        if status == 409:
            return ConfigError(message, field=field, received=said.get("received"), fix=fix)
        # A proxy whose server is down, a run whose disk is full: another attempt may help.
        kind = ControlLostError if status >= 500 else InfrastructureError
        return kind(f"the run answers {status}: {message}", field=field, received=self.url)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Runs `work` and returns its result; None where the event is set first, which cancels it."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks(working, waiting)
