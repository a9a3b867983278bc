"""A session as it is told to clients: plain JSON values."""

from __future__ import annotations

from typing import Any

from etude.environment.sessions import EnvironmentSession


def describe(session: EnvironmentSession) -> dict[str, Any]:
    """What is known of a session."""
    return {
        "id": session.id,
        "task": session.task.id if session.task else None,
        "instruction": session.instruction,
        "state": session.state,
        "busy": session.busy,
        "turns": session.num_turns,
        "finished": session.finished,
        "agent_error": session.agent_error,
        "origin": session.origin.digest,
        "created_s": session.created_s,
        "parent": session.parent,
        "parent_turn": session.parent_turn,
        "differences": [difference.to_document() for difference in session.differences],
        "snapshots": [kept.turn for kept in session.snapshots.kept],
        "snapshot_failures": session.snapshots.num_failures,
        "tools_digest": session.site.tools.digest,
        "last_event": session.events.last,
        "facts": session.facts.to_dict(),
    }
