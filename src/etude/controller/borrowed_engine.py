"""A borrowed replica as one of a run's engines: checks that it computes the same, and counts its usage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from etude.config import RunConfig
from etude.controller.compute import Place, choose_place, choose_weight_dtype
from etude.controller.remote.engines import Usage
from etude.errors import ConfigError
from etude.inference import EngineCounters, ServiceTimes
from etude.inference.cache import cache_type
from etude.inference.exchange import Build
from etude.inference.loan_client import LoanEndedError, LoanHandle
from etude.kit.tasks import end_tasks
from etude.tokens.tokenizer import Tokenizer

_REST_S = 30.0
"""Timeout of the final poll of a recalled replica; then it counts as lost."""


def engine_numerics(place: Place, weight_dtype: str, cache_dtype: str) -> dict[str, str]:
    """The settings that determine sampled tokens bit for bit, besides weights and versions. `weight_dtype`,
    `cache_dtype`: as in EngineConfig. Raises ConfigError for a format that these kernels do not have."""
    return {
        "device": place.device,
        "kernels": place.kernels,
        "weight_dtype": choose_weight_dtype(weight_dtype, place),
        "cache_dtype": cache_type(cache_dtype, place.kernels, place.dtype),
    }


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements on a replica that samples for a run."""

    numerics: Mapping[str, str]
    tokenizer: str
    """Digest."""
    context_tokens: int

    @staticmethod
    def of(config: RunConfig, tokenizer: Tokenizer) -> Needs:
        """The requirements of a run with a resolved configuration."""
        place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
        numerics = engine_numerics(place, config.engine.weight_dtype, config.engine.cache_dtype)
        return Needs(numerics, tokenizer.digest, config.agent.max_tokens)

    def check(self, about: Mapping[str, Any], url: str) -> None:
        """Raises ConfigError for a replica that would compute other values, or has too small a context."""
        theirs = about["numerics"]
        differing = [
            f"{name} {wanted} here, {theirs.get(name)} there"
            for name, wanted in self.numerics.items()
            if theirs.get(name) != wanted
        ]
        if about["tokenizer"] != self.tokenizer:
            differing.append("another tokenizer")
        if about["max_context_tokens"] < self.context_tokens:
            differing.append(f"contexts of {self.context_tokens} here, {about['max_context_tokens']} there")
        if differing:
            raise ConfigError(
                "a replica cannot sample for this run",
                field=url,
                received="; ".join(differing),
                fix="start it with the run's tokenizer, number formats, kernels and context",
            )


class BorrowedEngine(LoanHandle):
    """A Handle of an EngineProcess over a replica on loan."""

    def __init__(
        self,
        url: str,
        token: str,
        store: str,
        needs: Needs,
        on_end: Callable[[], None] = lambda: None,
        on_kill: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end`: called once the replica was recalled. `on_kill`: when it is killed. See LoanHandle."""
        super().__init__(url, token, store)
        self._needs = needs
        self._on_end, self._on_kill = on_end, on_kill
        self._is_polled = False
        """Whether polling has begun."""
        self._polled_all = asyncio.Event()
        """Set when all its requests have been answered completely."""
        self._before: Mapping[str, float] = {}
        """The engine's counters when the loan began."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles its address only, without calls in progress."""
        return BorrowedEngine, (self.url, self._token, self._store, self._needs)

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See LoanHandle.send. Raises LoanEndedError only after the final poll has delivered all chunks:
        the error ends the replica's requests, and would lose tokens in transit."""
        self._is_polled = self._is_polled or method == "poll"
        try:
            return await super().send(method, arguments, named)
        except LoanEndedError:
            if method == "poll":
                self._polled_all.set()
            self._on_end()
            if self._is_polled:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REST_S):
                        await self._polled_all.wait()
            raise

    async def return_loan(self) -> None:
        """Ends the loan; returns when the final poll has delivered all chunks."""
        ending = asyncio.ensure_future(self.send("end", (), {}))
        try:
            await self._polled_all.wait()
        finally:
            await end_tasks(ending)

    def kill(self) -> None:
        super().kill()
        self._polled_all.set()  # there are no more polls
        self._on_kill()

    async def _do(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """See LoanHandle. Converts the replica's answers to the types of the run's own processes."""
        result = await super()._do(method, *arguments, within_s=within_s)
        if method == "begin":
            return await self._check_build(result)
        return self._usage(result) if method in ("pulse", "activate") else result

    async def _check_build(self, about: Mapping[str, Any]) -> Build:
        try:
            self._needs.check(about, self.url)
            build = Build(**about["build"])
        except (KeyError, TypeError) as error:
            raise ConfigError(
                "a replica does not report its number formats and kernels",
                field=self.url,
                received=repr(error),
                fix="start it with the run's version of Étude",
            ) from error
        self._before = await super()._do("pulse")
        return build

    def _usage(self, now: Mapping[str, float]) -> Usage:
        done = {name: value - self._before.get(name, 0) for name, value in now.items()}
        counters = {f.name: int(done.get(f.name, 0)) for f in fields(EngineCounters)}
        times: dict[str, Any] = {
            name: done.get(name, 0.0) for name in ("step_s", "waiting_s", "swap_s", "stage_s")
        }
        return Usage(EngineCounters(**counters), ServiceTimes(**times))
