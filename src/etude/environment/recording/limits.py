"""What the sessions of a recording server may be asked to hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.environment.recording.session_map import MapLimits


@dataclass(frozen=True, slots=True)
class RecordingLimits:
    """What a server takes from its clients."""

    body_bytes: int = 64 << 20
    sessions_per_tenant: int = 1024
    requests_per_session: int = 64
    """At the same time."""
    idle_s: float = 3600.0
    """A session that nobody uses for so long is ended: see `Recordings.expire`."""
    session: MapLimits = field(default_factory=MapLimits)
    default_max_tokens: int = 4096
