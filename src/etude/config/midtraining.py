"""Mid-training on a generated corpus."""

from __future__ import annotations

from pydantic import Field

from etude.config.optimizer import MidtrainOptimizerConfig
from etude.config.pretraining import NextTokenConfig


class MidtrainConfig(NextTokenConfig):
    """Next-token training on code and on sessions of a scripted expert that makes mistakes."""

    num_sessions: int = Field(default=16_000, ge=1)
    """Expert sessions in the corpus."""
    num_code_documents: int = Field(default=8_000, ge=0)
    """Plain code documents in the corpus."""
    num_fix_documents: int = Field(default=16_000, ge=0)
    """Fixes in the corpus: a broken file, then the line that fixes it, without tool calls."""
    num_rewrite_documents: int = Field(default=8_000, ge=0)
    """Rewrites in the corpus: a file with up to three bugs, then the correct body of its function."""
    num_observed_sessions: int = Field(default=0, ge=0)
    """Expert sessions of `observed` tasks in the corpus. Few of them run the tests before the first edit."""
    num_observed_fixes: int = Field(default=0, ge=0)
    """Fixes of `observed` tasks in the corpus: a broken file, what a test run says of it, then the right
    line."""
    num_part_sessions: int = Field(default=0, ge=0)
    """Expert sessions of `composed` tasks with one bug in the corpus."""
    agent_weight: float = Field(default=1.0, ge=0)
    """Loss weight of the agent's own tokens."""
    observation_weight: float = Field(default=0.3, ge=0)
    """Loss weight of prompts and tool results; 0 masks them out."""
    code_weight: float = Field(default=0.5, ge=0)
    """Loss weight of plain code documents."""
    fix_weight: float = Field(default=4.0, ge=0)
    """Loss weight of the line that fixes a broken file; the file itself has `code_weight`."""
    # Sections are frozen, so a narrower type is safe.
    optimizer: MidtrainOptimizerConfig = MidtrainOptimizerConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Optimiser of this stage."""
