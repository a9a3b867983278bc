"""Statistics of how the agent works, not only whether it succeeds: means over trajectories' facts."""

from __future__ import annotations

from collections.abc import Iterable

from etude.records import Status, Trajectory


def summarize_behaviour(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Means per episode of what the agent did; empty without an episode.

    Reads the counts of `SessionFacts`; an absent one counts as 0. Keys:

    - `turns`, `calls`, `parallel_turns` (turns with two calls or more), `edits`, `test_runs`, `malformed`,
      `questions` (put to the user), `open_todos` and `sampled_tokens`: per episode;
    - `calls_per_turn`, `edits_per_turn` and `parallel_share` (of the turns); absent without any turn;
    - `terminal_share`: share of the calls that ran a command; absent without any call;
    - `comment_share`: share of comment lines in the characters that edits wrote; absent where nothing was
      written;
    - `finish_share`: share of the episodes that the agent ended itself;
    - `first_edit_right`: share of the episodes whose first edit was already the fix;
    - `reads_before_edits`: share of all edits whose file had been read before; absent without any edit.

    Trajectories that the infrastructure failed say nothing about the agent and are left out.
    """
    episodes = [item for item in trajectories if item.status is not Status.INFRASTRUCTURE]
    if not episodes:
        return {}
    count = len(episodes)

    def total(name: str) -> float:
        return float(sum(float(item.facts.get(name, 0)) for item in episodes))

    summary = {
        "turns": total("num_turns") / count,
        "calls": total("num_calls") / count,
        "parallel_turns": total("parallel_turns") / count,
        "edits": total("num_edits") / count,
        "test_runs": total("num_test_runs") / count,
        "malformed": total("malformed") / count,
        "finish_share": total("finished") / count,
        "first_edit_right": total("first_edit_right") / count,
        "questions": total("num_questions") / count,
        "open_todos": total("open_todos") / count,
        "sampled_tokens": sum(item.num_sampled_tokens for item in episodes) / count,
    }
    shares = {
        "calls_per_turn": ("num_calls", "num_turns"),
        "edits_per_turn": ("num_edits", "num_turns"),
        "parallel_share": ("parallel_turns", "num_turns"),
        "terminal_share": ("num_commands", "num_calls"),
        "comment_share": ("comment_characters", "written_characters"),
        "reads_before_edits": ("edits_after_read", "num_edits"),
    }
    for name, (part, whole) in shares.items():
        if total(whole):
            summary[name] = total(part) / total(whole)
    return summary
