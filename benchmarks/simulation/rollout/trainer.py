"""A simulated trainer behind a Handle: its steps only take time, during which sampling continues."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from etude.protocols import Handle, Trainer
from etude.records import Group, PolicyVersion, WeightManifest


class SimulatedTrainer(Handle[Trainer]):
    """Records the groups of each step."""

    def __init__(self, lineage: str, tokens_per_s: float, *, first_step: int = 0) -> None:
        """`tokens_per_s`: sampled tokens trained on per second."""
        self.version = PolicyVersion(lineage, first_step)
        self.trained: list[list[str]] = []
        """Group ids of each step."""
        self.lags: list[int] = []
        """Per trajectory: steps between its oldest token's version and the version trained with it."""
        self.num_trajectories = 0
        self.busy_s = 0.0
        self._tokens_per_s = tokens_per_s

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See Handle.send: `step` and `publish`."""
        if method == "publish":
            return WeightManifest(self.version, (), "memory:")
        assert method == "step", method
        return await self._step(*arguments)

    async def stop(self) -> None:
        """See Handle.stop."""

    def kill(self) -> None:
        """See Handle.kill."""

    async def _step(self, groups: Sequence[Group]) -> dict[str, float]:
        members = [member for group in groups for member in group.members]
        num_tokens = sum(member.num_sampled_tokens for member in members)
        took_s = num_tokens / self._tokens_per_s
        await asyncio.sleep(took_s)
        self.busy_s += took_s
        self.trained.append([group.id for group in groups])
        self.num_trajectories += len(members)
        oldest = (member.oldest_version for member in members)
        self.lags += [self.version.step - version.step for version in oldest if version is not None]
        self.version = PolicyVersion(self.version.lineage, self.version.step + 1)
        return {"train_s": took_s, "train_tokens": float(num_tokens)}
