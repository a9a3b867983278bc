"""Distributed training of one model by several processes; a single process uses `SingleRank` alone."""

from etude.training.parallel.ranks import Ranks, Share, SingleRank

__all__ = ["Ranks", "Share", "SingleRank"]
