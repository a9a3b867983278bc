"""Metrics of the continuous collector; they decide nothing: running sessions, what blocked further groups,
and whether the sessions left out of training are longer than the others, which would be a bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from etude.environment.fork_groups import ForkedEpisode
from etude.records import Group
from etude.rollout.buffer import StepGroups, trained_groups
from etude.rollout.forks import count_fork, fork_figures

_DECILES = 10


class LengthBias:
    """Compares the lengths of trajectories left out of training with those of all, since the start."""

    def __init__(self) -> None:
        self._all: Counter[int] = Counter()
        """Sampled tokens -> number of trajectories that have ended or were left out."""
        self._left_out: Counter[int] = Counter()

    def add(self, num_tokens: int) -> None:
        """Counts a trajectory that has ended."""
        self._all[num_tokens] += 1

    def leave_out(self, num_tokens: int, *, ended: bool) -> None:
        """Counts a trajectory that is not trained on. Not `ended`: it was cut short and not added before."""
        if not ended:
            self.add(num_tokens)
        self._left_out[num_tokens] += 1

    @property
    def share(self) -> float:
        """Share of all trajectories that was left out."""
        total = self._all.total()
        return self._left_out.total() / total if total else 0.0

    def by_decile(self) -> list[float]:
        """[10] share left out in each tenth of the trajectories by length, shortest first.

        Equal lengths belong to one tenth: that of the middle one among them.
        """
        if not self._all:
            return [0.0] * _DECILES
        lengths = sorted(self._all)
        counts = np.array([self._all[length] for length in lengths])
        middles = counts.cumsum() - (counts + 1) // 2
        tenths = np.minimum(middles * _DECILES // counts.sum(), _DECILES - 1)
        out = np.array([self._left_out[length] for length in lengths])
        inside = [tenths == tenth for tenth in range(_DECILES)]
        return [float(out[own].sum()) / max(1, int(counts[own].sum())) for own in inside]


class Occupancy:
    """Time integrals of the number of running sessions and of what blocked further groups."""

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

    def update(self, num_sessions: int, blocked_by: str, lacks_oldest: bool) -> None:
        """Sets the state from now on: the number of running sessions, what keeps another group from beginning
        (`staleness`, `slots`, or `tasks` that are used up), and whether the trainer waits only for a group
        that no later step could train."""
        now_s = self._clock()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self._session_s += elapsed_s * self._sessions
        self._blocked_s[self._blocked_by] = self._blocked_s.get(self._blocked_by, 0.0) + elapsed_s
        self._oldest_s += elapsed_s * self._lacks_oldest
        self._sessions, self._blocked_by, self._lacks_oldest = num_sessions, blocked_by, lacks_oldest

    def pop_figures(self) -> dict[str, float]:
        """Metrics since the last call: seconds, the mean number of sessions, and shares of the time."""
        self.update(self._sessions, self._blocked_by, self._lacks_oldest)
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


class CollectorMetrics:
    """Counts sessions and groups as they finish and as they are left out of training."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds."""
        self.occupancy = Occupancy(clock)
        self._lengths = LengthBias()
        self._aborted = self._carried = self._from_log = 0
        self._forks: Counter[str] = Counter()
        self._late_gaps: list[float] = []
        """Per group with aborted stragglers: mean verdict of the half that ended later minus the other's."""

    def add_episode(self, episode: ForkedEpisode) -> None:
        """Counts an episode that finished in time for its group, or is carried into it."""
        self._lengths.add(episode.trajectory.num_sampled_tokens)
        count_fork(episode, self._forks)

    def count_carried(self) -> None:
        """Counts a straggler that finished before its group was trained on."""
        self._carried += 1

    def count_aborted(self, num_tokens: int) -> None:
        """Counts a straggler that was ended after so many tokens."""
        self._lengths.leave_out(num_tokens, ended=False)
        self._aborted += 1

    def record_late_gap(self, verdicts: Sequence[float]) -> None:
        """`verdicts`: of the members of a group that aborts its stragglers, in the order in which they ended.
        How much less later members earned than earlier ones hints at what the aborted would have earned."""
        half = len(verdicts) // 2
        if half:
            early, late = verdicts[:half], verdicts[-half:]
            self._late_gaps.append((sum(late) - sum(early)) / half)

    def count_from_log(self) -> None:
        """Counts a group that was collected before the run was resumed."""
        self._from_log += 1

    def add_stale(self, group: Group) -> None:
        """Counts a group that was too old as a whole."""
        for member in group.members:
            self._lengths.leave_out(member.num_sampled_tokens, ended=True)

    def pop_figures(self, popped: StepGroups, *, with_forks: bool) -> dict[str, float]:
        """Metrics since the last call. `popped`: the groups of the step."""
        figures = {
            "stale_trajectories": float(sum(len(unit.group.members) for unit in popped.stale)),
            "stale_masked_tokens": float(popped.masked_tokens),
            "stragglers_aborted": float(self._aborted),
            "stragglers_carried": float(self._carried),
            "groups_from_log": float(self._from_log),
            "left_out_share": self._lengths.share,
            **self.occupancy.pop_figures(),
        }
        if self._late_gaps:
            figures["late_verdict_gap"] = sum(self._late_gaps) / len(self._late_gaps)
        if with_forks:
            figures |= fork_figures(trained_groups(popped), self._forks)
        if self._lengths.share:
            shares = enumerate(self._lengths.by_decile(), 1)
            figures |= {f"left_out_decile{tenth}": share for tenth, share in shares}
        self._aborted = self._carried = self._from_log = 0
        self._forks.clear()
        self._late_gaps.clear()
        return figures
