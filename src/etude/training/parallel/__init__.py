"""Many processes that train one model; one process needs nothing of it."""

from etude.training.parallel.ranks import Ranks, Share, SingleRank

__all__ = ["Ranks", "Share", "SingleRank"]
