"""What is known of a session when it is rewarded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.environment.grading import Verdict
from etude.records import Status, Task


@dataclass(frozen=True, slots=True)
class Evidence:
    """What terms of the reward see; nothing of it did the agent write down about itself."""

    task: Task
    status: Status
    verdict: Verdict
    facts: Mapping[str, Any]
    """`SessionFacts.to_dict()`: counts over the session."""

    def count(self, name: str) -> int:
        """A count among the facts."""
        return int(self.facts.get(name, 0))

    def errors(self, kind: str) -> int:
        """Tool errors of one class (`ToolErrorClass`)."""
        return int(self.facts.get("errors_by_class", {}).get(kind, 0))
