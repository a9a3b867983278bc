"""What a continuous collector counts from step to step, for its figures alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from etude.environment.fork_groups import ForkedEpisode
from etude.records import Group, Trajectory
from etude.rollout.buffer import Taken, trained_groups
from etude.rollout.forks import count_fork, fork_figures
from etude.rollout.lengths import LengthBias
from etude.rollout.occupancy import Occupancy


@dataclass(slots=True)
class _Counts:
    """Since the last step."""

    aborted: int = 0
    carried: int = 0
    from_log: int = 0
    forks: Counter[str] = field(default_factory=Counter[str])
    late_gaps: list[float] = field(default_factory=list[float])
    """Of groups with aborted stragglers: mean verdict of the later half to end, less that of the earlier."""


class Tally:
    """Sessions and groups, as they come and as they are left out."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self._lengths = LengthBias()
        self._occupancy = Occupancy(clock)
        self._counts = _Counts()

    def note(self, num_sessions: int, blocked_by: str, lacks_oldest: bool) -> None:
        """See Occupancy.note."""
        self._occupancy.note(num_sessions, blocked_by, lacks_oldest)

    def came(self, episode: ForkedEpisode) -> None:
        """An episode has come in time to belong to its group, or to be carried."""
        self._lengths.add(episode.trajectory.num_sampled_tokens)
        count_fork(episode, self._counts.forks)

    def carried(self) -> None:
        """A straggler has come before its group was trained on."""
        self._counts.carried += 1

    def aborted(self, num_tokens: int) -> None:
        """A straggler was ended after so many tokens."""
        self._lengths.leave_out(num_tokens, ended=False)
        self._counts.aborted += 1

    def ended_without(self, verdicts: Sequence[float]) -> None:
        """A group whose members had these verdicts, in the order in which they ended, goes on without
        stragglers: what later members earned less than earlier ones hints at what the aborted would have."""
        half = len(verdicts) // 2
        if half:
            early, late = verdicts[:half], verdicts[-half:]
            self._counts.late_gaps.append((sum(late) - sum(early)) / half)

    def found_in_log(self) -> None:
        """A group was collected before the run was resumed."""
        self._counts.from_log += 1

    def dropped(self, group: Group) -> None:
        """A whole group was too old."""
        for member in group.members:
            self._lengths.leave_out(member.num_sampled_tokens, ended=True)

    def take(self, taken: Taken, *, with_forks: bool) -> dict[str, float]:
        """Figures since the last call."""
        counts, self._counts = self._counts, _Counts()
        members: Sequence[Trajectory] = [m for one in taken.stale for m in one.group.members]
        figures = {
            "stale_trajectories": float(len(members)),
            "stale_masked_tokens": float(taken.masked_tokens),
            "stragglers_aborted": float(counts.aborted),
            "stragglers_carried": float(counts.carried),
            "groups_from_log": float(counts.from_log),
            "left_out_share": self._lengths.share,
            **self._occupancy.take(),
        }
        if counts.late_gaps:
            figures["late_verdict_gap"] = sum(counts.late_gaps) / len(counts.late_gaps)
        if with_forks:
            figures |= fork_figures(trained_groups(taken), counts.forks)
        if self._lengths.share:
            shares = enumerate(self._lengths.by_decile(), 1)
            figures |= {f"left_out_decile{tenth}": share for tenth, share in shares}
        return figures
