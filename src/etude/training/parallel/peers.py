"""Ranks that publish weights together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from etude.errors import RankError


class RankPeers:
    """Implements the publisher's Peers over a process group that nothing else uses: its messages come from
    another thread than those of training."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, value: Any) -> list[Any]:
        """See Peers. Raises RankError where a rank is gone."""
        told: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(told, value, group=self._group)
        except (RuntimeError, ConnectionError) as error:
            raise RankError(
                f"a rank is gone while weights are published: {error}",
                field="parallel",
                fix="see its messages above, then go on from the last checkpoint with --resume",
            ) from error
        return told
