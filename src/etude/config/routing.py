"""Configuration of the router over inference replicas, in a file of its own: `etude route --config FILE`."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from etude.config.base import Section

_DAY_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d")
Name = Annotated[str, StringConstraints(min_length=1)]
Share = Annotated[float, Field(ge=0)]


class ReplicaConfig(Section):
    """One replica of a router."""

    url: Name
    """Address of the replica, `http://HOST:PORT`."""
    pool: str = ""
    """Pool of the replica. Empty: the one that it reports itself."""


class LendingPoolsConfig(Section):
    """Two pools, of which one lends replicas to the other."""

    lender: Name
    """Pool whose replicas are lent."""
    borrower: Name
    """Pool that they serve while they are lent."""

    @model_validator(mode="after")
    def _pools_differ(self) -> Self:
        if self.lender == self.borrower:
            raise ValueError(f"borrower: must be another pool than the lender, received {self.borrower!r}")
        return self


class LendingWindowConfig(LendingPoolsConfig):
    """Replicas that are lent every day in the same hours."""

    count: int = Field(ge=1)
    """Number of replicas."""
    start: str
    """Start, `HH:MM` in UTC."""
    end: str
    """End, `HH:MM` in UTC; on the next day if it is before the start."""
    busy_tokens: float = Field(default=0.0, ge=0)
    """Load of the lender above which it gets all of them back at once. None is lent until the load has been
    below this for `hold_s`. 0: only the time counts."""

    @model_validator(mode="after")
    def _fits_together(self) -> LendingWindowConfig:
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


class LendingLoadConfig(LendingPoolsConfig):
    """Replicas that are lent one at a time while the borrower is busy and the lender is not. The load is the
    mean number of tokens still to be sampled per replica of a pool."""

    busy_tokens: float = Field(gt=0)
    """Load above which a pool is busy."""
    idle_tokens: float = Field(ge=0)
    """Load below which a pool is idle; must be less than `busy_tokens`."""
    most: int = Field(default=1, ge=1)
    """Largest number of replicas that are lent at the same time."""

    @model_validator(mode="after")
    def _fits_together(self) -> LendingLoadConfig:
        if self.idle_tokens >= self.busy_tokens:
            raise ValueError(
                f"idle_tokens: must be less than busy_tokens={self.busy_tokens:g}, received "
                f"{self.idle_tokens:g}"
            )
        return self


class LendingConfig(Section):
    """Lending of replicas between pools: by schedule or by load, not both."""

    windows: tuple[LendingWindowConfig, ...] = ()
    """Lending by schedule."""
    by_load: tuple[LendingLoadConfig, ...] = ()
    """Lending by load."""
    keep: int = Field(default=1, ge=0)
    """Number of replicas that always stay with their pool."""
    hold_s: float = Field(default=60.0, ge=0)
    """Seconds between two moves by load."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> LendingConfig:
        if self.windows and self.by_load:
            raise ValueError("by_load: lend by schedule or by load, not both, received windows too")
        return self


class RouterLimitsConfig(Section):
    """Limits of one request."""

    answer_s: float = Field(default=600.0, ge=1)
    """Seconds without an answer after which the router treats a replica as failed."""
    attempts: int = Field(default=3, ge=1)
    """Largest number of replicas that are tried for one request."""
    body_bytes: int = Field(default=64 << 20, ge=1)
    """Size limit of a request."""
    hedge_after_s: float = Field(default=0.0, ge=0)
    """Seconds without a first byte after which a second replica is asked as well; 0: never."""
    drain_s: float = Field(default=60.0, ge=0)
    """Seconds that running requests may take to finish after SIGTERM."""


class HealthCheckConfig(Section):
    """When a replica is ejected, and when it is tried again."""

    interval_s: float = Field(default=1.0, ge=0.05)
    """Seconds between two health checks of a replica."""
    timeout_s: float = Field(default=2.0, gt=0)
    """Time limit of one health check in seconds."""
    eject_after: int = Field(default=2, ge=1)
    """Consecutive failures, of health checks or requests, after which a replica is ejected."""
    backoff_s: float = Field(default=1.0, gt=0)
    """Seconds until an ejected replica is checked again. The wait doubles with every further failure."""
    most_backoff_s: float = Field(default=60.0, gt=0)
    """Longest such wait in seconds."""


class RouterConfig(Section):
    """A router over several replicas."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8670, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Host names by which clients reach the router, besides its address. Requests by other names are
    refused."""
    pool: Name = "serve"
    """Pool for requests that name none."""
    replicas_check_keys: bool = False
    """Whether the replicas check API keys themselves. Required for addresses other than loopback, since the
    router checks none."""
    spill_factor: float = Field(default=3.0, ge=1)
    """A session moves to another replica when its own has this many times the work of the best other one."""
    replicas: tuple[ReplicaConfig, ...] = ()
    """Replicas at the start; more may join later."""
    arms: dict[str, Share] = Field(default_factory=dict)
    """Share of the sessions for each policy version, for A/B tests. Empty: no assignment."""
    limits: RouterLimitsConfig = RouterLimitsConfig()
    """Limits of one request."""
    health: HealthCheckConfig = HealthCheckConfig()
    """Health checks."""
    lending: LendingConfig = LendingConfig()
    """Lending."""


def _seconds(text: str) -> float:
    hours, minutes = text.split(":")
    return 3600.0 * int(hours) + 60.0 * int(minutes)
