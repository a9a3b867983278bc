"""What may be asked of a sandbox, looked at before anything is sent."""

from __future__ import annotations

import math

from etude.errors import ConfigError

MAX_TIMEOUT_S = 1e6
"""The longest timeout of a command (11 days): a program inside cannot sleep for longer at once."""


def check_timeout(timeout_s: float) -> None:
    """Raises ConfigError for a timeout of a command or test run that is negative, zero, NaN or endless."""
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            "a timeout is a number of seconds",
            field="timeout_s",
            received=timeout_s,
            fix=f"give more than 0 and at most {MAX_TIMEOUT_S:.0f}; commands.start takes None: no timeout",
        )


def check_life(timeout_s: float | None) -> None:
    """Raises ConfigError for a time to live that is over before it begins, or is no number."""
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ConfigError(
            "a time to live is more than 0 seconds",
            field="timeout_s",
            received=timeout_s,
            fix="None: for ever",
        )


def check_count(count: int) -> None:
    """Raises ConfigError for a number of copies that is less than one."""
    if count < 1:
        raise ConfigError(
            "a fork makes at least one copy", field="count", received=count, fix="ask for 1 or more"
        )
