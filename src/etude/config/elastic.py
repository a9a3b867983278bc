"""Replicas that a run borrows from a serving pool."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from etude.config.base import HttpAddress, SecretSource, Section

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class ElasticConfig(Section):
    """Replicas that a run borrows from a router's pools and gives back. See docs/elastic.md."""

    router: HttpAddress = ""
    """Address of a router that lends replicas, `http://HOST:PORT`. Empty: none is borrowed."""
    token: SecretSource = ""
    """Source of the router's token for borrowers: `file:PATH` or `env:NAME`. Empty: none is sent."""
    pool: str = "rollout"
    """Pool of the router whose replicas the run uses."""
    most: int = Field(default=1, ge=1)
    """Largest number of replicas that are borrowed at the same time."""
    hours: str = ""
    """Hours in which replicas are borrowed: `HH:MM-HH:MM` in UTC, over midnight if the end is before the
    start. Empty: at any time. The router's own rules apply as well."""
    busy_tokens: float = Field(default=0.0, ge=0)
    """Borrows only while each of the run's engines has more than this many tokens to sample; 0: always. Works
    for sessions in the run's own process only."""
    idle_tokens: float = Field(default=0.0, ge=0)
    """Gives all replicas back below this many tokens; must be less than `busy_tokens`."""
    poll_s: float = Field(default=1.0, ge=0.05)
    """Seconds between two requests to the router."""
    lease_s: float = Field(default=15.0, gt=0)
    """Seconds of silence after which a loan ends: a replica returns to its pool if it hears nothing from the
    run, and the run gives all replicas back if it hears nothing from the router."""

    @model_validator(mode="after")
    def _fits_together(self) -> ElasticConfig:
        if self.hours and not _HOURS.fullmatch(self.hours):
            raise ValueError(f"hours: must be HH:MM-HH:MM, received {self.hours!r}")
        if self.hours and self.hours[:5] == self.hours[6:]:
            raise ValueError(f"hours: must begin and end at different times, received {self.hours!r}")
        if self.idle_tokens and self.idle_tokens >= self.busy_tokens:
            raise ValueError(
                f"idle_tokens: must be less than busy_tokens={self.busy_tokens:g}, received "
                f"{self.idle_tokens:g}"
            )
        if self.lease_s < 3 * self.poll_s:
            raise ValueError(
                f"lease_s: must be at least three times poll_s={self.poll_s:g}, received {self.lease_s:g}"
            )
        return self

    def open_at(self, day_s: float) -> bool:
        """Whether replicas may be borrowed at this second of the day, UTC."""
        found = _HOURS.fullmatch(self.hours)
        if found is None:
            return True
        numbers = [int(text) for text in found.groups()]
        start_s, end_s = numbers[0] * 3600 + numbers[1] * 60, numbers[2] * 3600 + numbers[3] * 60
        if start_s <= end_s:
            return start_s <= day_s < end_s
        return day_s >= start_s or day_s < end_s
