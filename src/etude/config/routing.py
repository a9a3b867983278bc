"""The router over inference replicas: `etude route --config FILE`. A file of its own, apart from a run's."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from etude.config.base import Section

_DAY_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d")
Name = Annotated[str, StringConstraints(min_length=1)]
Share = Annotated[float, Field(ge=0)]


class ReplicaConfig(Section):
    """One replica."""

    url: Name
    """Its address, `http://HOST:PORT`."""
    pool: str = ""
    """The pool that it belongs to; empty: the one that it names itself."""


class LendingWindowConfig(Section):
    """Replicas lent every day."""

    lender: Name
    """Pool whose replicas are lent."""
    borrower: Name
    """Pool that they work for meanwhile."""
    count: int = Field(ge=1)
    """Replicas."""
    start: str
    """Beginning, `HH:MM` in UTC."""
    end: str
    """End, `HH:MM` in UTC; over midnight if it is before the beginning."""
    busy_tokens: float = Field(default=0.0, ge=0)
    """Load of the lender above which it gets all of them back at once, and none is lent until it has been
    below for `hold_s`; 0: the time alone decides."""

    @model_validator(mode="after")
    def _fits_together(self) -> LendingWindowConfig:
        _check_pools(self.lender, self.borrower)
        for name, value in (("start", self.start), ("end", self.end)):
            if not _DAY_TIME.fullmatch(value):
                raise ValueError(f"{name}: must be HH:MM, received {value!r}")
        if self.start == self.end:
            raise ValueError(f"end: must be another time than start={self.start}, received {self.end!r}")
        return self

    @property
    def start_s(self) -> float:
        """Second of the day."""
        return _seconds(self.start)

    @property
    def end_s(self) -> float:
        """Second of the day."""
        return _seconds(self.end)


class LendingLoadConfig(Section):
    """Replicas lent one at a time while the borrower is loaded and the lender is not. Load: the mean of the
    tokens yet to be sampled on a pool's replicas."""

    lender: Name
    """Pool whose replicas are lent."""
    borrower: Name
    """Pool that they work for meanwhile."""
    busy_tokens: float = Field(gt=0)
    """Loaded: above this."""
    idle_tokens: float = Field(ge=0)
    """Not loaded: below this, which must be less than `busy_tokens`."""
    most: int = Field(default=1, ge=1)
    """Replicas that may be lent at once."""

    @model_validator(mode="after")
    def _fits_together(self) -> LendingLoadConfig:
        _check_pools(self.lender, self.borrower)
        if self.idle_tokens >= self.busy_tokens:
            raise ValueError(
                f"idle_tokens: must be less than busy_tokens={self.busy_tokens:g}, received "
                f"{self.idle_tokens:g}"
            )
        return self


class LendingConfig(Section):
    """Replicas lent between pools: by schedule or by load, not both."""

    windows: tuple[LendingWindowConfig, ...] = ()
    """By schedule."""
    by_load: tuple[LendingLoadConfig, ...] = ()
    """By load."""
    keep: int = Field(default=1, ge=0)
    """Replicas that a pool has left at least."""
    hold_s: float = Field(default=60.0, ge=0)
    """From one move by load to the next."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> LendingConfig:
        if self.windows and self.by_load:
            raise ValueError("by_load: lend by schedule or by load, not both, received windows too")
        return self


class RouterLimitsConfig(Section):
    """What a request may take."""

    answer_s: float = Field(default=600.0, ge=1)
    """A replica that sends nothing for so long has lost its request."""
    attempts: int = Field(default=3, ge=1)
    """Replicas that are tried for one request, at most."""
    body_bytes: int = Field(default=64 << 20, ge=1)
    """Largest request."""
    hedge_after_s: float = Field(default=0.0, ge=0)
    """Without a first byte for so long a second replica is asked as well; 0: never."""
    drain_s: float = Field(default=60.0, ge=0)
    """How long answers under way may go on after SIGTERM."""


class HealthCheckConfig(Section):
    """When a replica is left alone, and when it is tried again."""

    interval_s: float = Field(default=1.0, ge=0.05)
    """Between two probes of one replica."""
    timeout_s: float = Field(default=2.0, gt=0)
    """Of one probe."""
    eject_after: int = Field(default=2, ge=1)
    """Failures in a row, of probes or requests."""
    backoff_s: float = Field(default=1.0, gt=0)
    """First wait of an ejected replica until it is probed again; doubles with every further failure."""
    most_backoff_s: float = Field(default=60.0, gt=0)
    """Longest wait."""


class RouterConfig(Section):
    """A router."""

    host: str = "127.0.0.1"
    """Address to bind to."""
    port: int = Field(default=8670, ge=0, le=65535)
    """0: any that is free."""
    pool: Name = "serve"
    """Of requests that name none."""
    replicas_check_keys: bool = False
    """Whether they do: needed for addresses that others reach, since the router checks none."""
    spill_factor: float = Field(default=3.0, ge=1)
    """Times the work of the best other replica that moves a session."""
    replicas: tuple[ReplicaConfig, ...] = ()
    """Those that are there at the start; more may join."""
    arms: dict[str, Share] = Field(default_factory=dict)
    """Shares of the sessions that are pinned to each policy version, for A/B tests; empty: all alike."""
    limits: RouterLimitsConfig = RouterLimitsConfig()
    """Limits."""
    health: HealthCheckConfig = HealthCheckConfig()
    """Health checks."""
    lending: LendingConfig = LendingConfig()
    """Lending."""


def _check_pools(lender: str, borrower: str) -> None:
    if lender == borrower:
        raise ValueError(f"borrower: must be another pool than the lender, received {borrower!r}")


def _seconds(text: str) -> float:
    hours, minutes = text.split(":")
    return 3600.0 * int(hours) + 60.0 * int(minutes)
