"""What whoever trains says of a recorded session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.environment.recording.fields import SamplingDefaults
from etude.records import TrajectoryId


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What whoever trains says of a session when it begins."""

    trajectory_id: TrajectoryId
    group_size: int = 1
    """Sessions that are compared with each other: members of the group."""
    consent: str = "synthetic"
    keep_thinking: bool = True
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
