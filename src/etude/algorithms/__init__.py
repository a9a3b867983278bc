"""Advantages, losses, corrections and divergences as pure functions, one idea per file."""

from etude.algorithms.advantages import group_advantages, has_task_variance
from etude.algorithms.cispo import cispo
from etude.algorithms.clip import clipped_surrogate
from etude.algorithms.decoupled import decoupled
from etude.algorithms.divergence import k1, k2, k3
from etude.algorithms.effective_size import effective_sample_share
from etude.algorithms.geometric_mask import geometric_mask
from etude.algorithms.gspo import gspo
from etude.algorithms.icepop import token_mask
from etude.algorithms.normalizers import NORMALIZERS
from etude.algorithms.rejection import rejection_sampling
from etude.algorithms.terms import MAX_LOG_RATIO, LossTerms, importance_ratio
from etude.algorithms.tis import truncated_weights

__all__ = [
    "MAX_LOG_RATIO",
    "NORMALIZERS",
    "LossTerms",
    "cispo",
    "clipped_surrogate",
    "decoupled",
    "effective_sample_share",
    "geometric_mask",
    "group_advantages",
    "gspo",
    "has_task_variance",
    "importance_ratio",
    "k1",
    "k2",
    "k3",
    "rejection_sampling",
    "token_mask",
    "truncated_weights",
]
