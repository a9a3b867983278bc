"""Replicas that a run borrows from a serving pool."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from etude.config.base import Section
from etude.config.secrets import SecretSource

_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class ElasticConfig(Section):
    """Replicas that a run borrows from a router's pools, and gives back. See docs/elastic.md."""

    router: str = ""
    """Address of a router that lends replicas, `http://HOST:PORT`; empty: none is borrowed."""
    token: SecretSource = ""
    """Where the router's token for borrowers is: `file:PATH` or `env:NAME`. Empty: it asks for none."""
    pool: str = "rollout"
    """Replicas that work for this pool of the router's are had."""
    most: int = Field(default=1, ge=1)
    """Replicas that are borrowed at once."""
    hours: str = ""
    """Only then: `HH:MM-HH:MM` in UTC, over midnight if the end is before the beginning. Empty: at any time.
    When the replicas may be had is said by the router's rules as well."""
    busy_tokens: float = Field(default=0.0, ge=0)
    """Only while each of the run's engines has more than so many tokens to sample; 0: whatever they have. For
    sessions in the run's own process."""
    idle_tokens: float = Field(default=0.0, ge=0)
    """Below this all are given back; less than `busy_tokens`."""
    poll_s: float = Field(default=1.0, ge=0.05)
    """Between two questions to the router."""
    lease_s: float = Field(default=15.0, gt=0)
    """A replica goes home when it has not heard of the run for so long; and the run gives all back when it
    has not heard of the router for so long."""

    @model_validator(mode="after")
    def _fits_together(self) -> ElasticConfig:
        if self.router and not self.router.startswith(("http://", "https://")):
            raise ValueError(f"router: must be http://HOST:PORT, received {self.router!r}")
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
