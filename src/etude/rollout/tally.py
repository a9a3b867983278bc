"""What a continuous collector counts from step to step, for its figures alone: how many sessions ran, what
kept more from beginning, and whether what is left out is longer than what is not, which is a bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from etude.environment.fork_groups import ForkedEpisode
from etude.records import Group, Trajectory
from etude.rollout.buffer import Taken, trained_groups
from etude.rollout.forks import count_fork, fork_figures

_DECILES = 10


class LengthBias:
    """Sampled tokens of all trajectories of a sitting, and of those that were left out."""

    def __init__(self) -> None:
        self._all: Counter[int] = Counter()
        """Length -> trajectories that have come to an end or were left out."""
        self._left_out: Counter[int] = Counter()

    def add(self, num_tokens: int) -> None:
        """A trajectory has ended."""
        self._all[num_tokens] += 1

    def leave_out(self, num_tokens: int, *, ended: bool) -> None:
        """A trajectory is not trained on. One that has not `ended` is at least so long."""
        if not ended:
            self.add(num_tokens)
        self._left_out[num_tokens] += 1

    @property
    def share(self) -> float:
        """Trajectories left out, of all."""
        total = self._all.total()
        return self._left_out.total() / total if total else 0.0

    def by_decile(self) -> list[float]:
        """[10] of the trajectories in each tenth by length, shortest first, the share that was left out.

        Equal lengths are in one tenth: that of the middle one among them.
        """
        if not self._all:
            return [0.0] * _DECILES
        lengths = sorted(self._all)
        counts = np.array([self._all[length] for length in lengths])
        middles = counts.cumsum() - (counts + 1) // 2
        tenths = np.minimum(middles * _DECILES // counts.sum(), _DECILES - 1)
        out = np.array([self._left_out[length] for length in lengths])
        return [_share(out[tenths == tenth], counts[tenths == tenth]) for tenth in range(_DECILES)]


def _share(out: Sequence[int] | np.ndarray, of: Sequence[int] | np.ndarray) -> float:
    total = int(np.sum(of))
    return float(np.sum(out)) / total if total else 0.0


class Occupancy:
    """Integrates over time what was noted last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._since_s = self._last_s = clock()
        self._sessions = 0
        self._blocked_by = ""
        self._lacks_oldest = False
        self._session_s = 0.0
        self._blocked_s: dict[str, float] = {}
        self._oldest_s = 0.0

    def note(self, num_sessions: int, blocked_by: str, lacks_oldest: bool) -> None:
        """From now on so many sessions run, this keeps another group from beginning (`staleness`, `slots`, or
        `tasks` that are used up), and the trainer waits for nothing but a group that no later step could
        train, or not."""
        now_s = self._clock()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self._session_s += elapsed_s * self._sessions
        self._blocked_s[self._blocked_by] = self._blocked_s.get(self._blocked_by, 0.0) + elapsed_s
        self._oldest_s += elapsed_s * self._lacks_oldest
        self._sessions, self._blocked_by, self._lacks_oldest = num_sessions, blocked_by, lacks_oldest

    def take(self) -> dict[str, float]:
        """Figures since the last call: seconds, the mean number of sessions, and shares of the time."""
        self.note(self._sessions, self._blocked_by, self._lacks_oldest)
        elapsed_s = self._last_s - self._since_s
        whole = elapsed_s or 1.0
        figures = {
            "rollout_s": elapsed_s,
            "sessions_mean": self._session_s / whole,
            "waiting_for_oldest_share": self._oldest_s / whole,
            "blocked_by_staleness_share": self._blocked_s.get("staleness", 0.0) / whole,
            "blocked_by_slots_share": self._blocked_s.get("slots", 0.0) / whole,
        }
        self._since_s, self._session_s, self._oldest_s, self._blocked_s = self._last_s, 0.0, 0.0, {}
        return figures


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
    """Sessions and groups, as they come and as they are left out. Implements `Occupancy`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self._lengths = LengthBias()
        self._occupancy = Occupancy(clock)
        self._counts = _Counts()

    def note(self, num_sessions: int, blocked_by: str, lacks_oldest: bool) -> None:
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
