"""Next-token training: common settings, mid-training, continued pre-training, and SFT."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field, model_validator

from etude.config.base import Section
from etude.config.optimizer import MidtrainOptimizerConfig, OptimizerConfig

_NAME = re.compile(r"[A-Za-z0-9_-]+")


class NextTokenConfig(Section):
    """Settings of every kind of next-token training."""

    num_steps: int = Field(default=1_000, ge=0)
    """Optimiser steps."""
    tokens_per_step: int = Field(default=4_096, ge=64)
    """Tokens per optimiser step, observations included."""
    micro_batch_tokens: int = Field(default=0, ge=0)
    """Largest number of tokens that are computed at once, which bounds memory; 0: the whole step. Three
    quarters of a prefix of all sequences count once. On a CPU a step is split further, into micro-batches of
    about 768 tokens that are divided among threads."""
    products: Literal["float32", "bfloat16"] = "float32"
    """Number format in which float32 numbers are multiplied. `bfloat16`: factors are rounded, sums are not,
    if the processor has instructions for it (tested with AMX and AVX-512)."""
    balance_weight: float = Field(default=0.01, ge=0)
    """Weight of the router's load-balancing loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser of this stage."""


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


class MixtureSourceConfig(Section):
    """Settings of every source of a mixture."""

    path: str
    """Path of the source."""
    weight: float = Field(default=1.0, ge=0)
    """Share of the trained tokens, relative to the other sources."""
    max_epochs: int = Field(default=0, ge=0)
    """Largest number of passes through the source; after that the other sources take its share. 0: no
    limit."""
    heldout_share: float = Field(default=0.02, ge=0, lt=1)
    """Share of the documents, chosen by their content, that is never trained on."""


class SourceConfig(MixtureSourceConfig):
    """One source of documents. Its held-out loss is reported separately."""

    path: str
    """A JSONL file (also .jsonl.zst), a Parquet file, a Lance data set (a directory NAME.lance), a directory
    of such files, or with `format="files"` a directory of texts."""
    format: Literal["auto", "jsonl", "parquet", "lance", "files"] = "auto"
    """`auto`: by the name; a directory is read as `files` unless it holds only JSONL or Parquet files."""
    column: str = "text"
    """Column or key that holds a document: a text, or a list of token ids."""
    pattern: str = "**/*.py"
    """With `files`: pattern of the files to read, relative to `path`."""


class StageConfig(Section):
    """A longer context window from a given step on."""

    from_step: int = Field(ge=0)
    """First step, counted from 0, that is trained with this window."""
    window: int = Field(ge=16)
    """Context window of the model from this step on, in tokens."""
    rope: Literal["yarn", "base", "keep"] = "yarn"
    """How positions are extended. `yarn`: scaled by the ratio of the windows (Peng et al. 2023). `base`:
    the rotary embedding gets the base `rope_theta`. `keep`: not at all."""
    rope_theta: float = Field(default=0.0, ge=0)
    """With `base`: the new base. 0: raised so that the slowest dimension turns as far in the new window as it
    did in the old one (NTK-aware)."""


class DraftsConfig(Section):
    """Layers for multi-token prediction, from which the engine drafts tokens."""

    num_layers: int = Field(default=0, ge=0, le=8)
    """Number of layers, one per token drafted ahead; 0: none. If the initial checkpoint has such layers,
    their training continues."""
    weight: float = Field(default=0.3, gt=0)
    """Weight of their loss, the mean over layers (DeepSeek-V3, 2024)."""
    only: bool = False
    """Whether the rest of the model is frozen."""


class MixtureConfig(NextTokenConfig):
    """Next-token training on a mixture of sources."""

    heldout_every_steps: int = Field(default=100, ge=0)
    """Steps between measurements of the held-out loss; 0: only before the first and after the last."""
    heldout_tokens: int = Field(default=16_384, ge=64)
    """Largest number of held-out tokens per source."""
    pool_tokens: int = Field(default=32_768, ge=0)
    """Tokens drawn ahead, from which steps are filled so that little room is wasted."""
    drafts: DraftsConfig = DraftsConfig()
    """Layers for multi-token prediction."""


class PretrainConfig(MixtureConfig):
    """`etude pretrain`: next-token training on text corpora."""

    sources: dict[str, SourceConfig] = Field(default_factory=dict[str, SourceConfig])
    """By name: `[pretrain.sources.NAME]`."""
    tokenizer: str = ""
    """Directory of a tokenizer; empty: that of `initial_checkpoint`, or trained on the sources."""
    cache: str = "runs/.corpora"
    """Directory in which tokenised corpora are kept for all runs that read them."""
    fim_rate: float = Field(default=0.0, ge=0, le=1)
    """Share of the text documents that are rearranged for fill-in-the-middle: prefix, suffix, then the
    middle."""
    fim_spm_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the rearranged documents that start with the suffix (SPM); the others start with the prefix
    (PSM)."""
    stages: dict[str, StageConfig] = Field(default_factory=dict[str, StageConfig])
    """Longer windows in stages, by name: `[pretrain.stages.NAME]`."""
    # Sections are frozen, so a narrower type is safe.
    optimizer: MidtrainOptimizerConfig = MidtrainOptimizerConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Optimiser of this stage."""

    @model_validator(mode="after")
    def _fits_together(self) -> PretrainConfig:
        check_weights(self.sources)
        check_names("stages", self.stages)
        steps = sorted(stage.from_step for stage in self.stages.values())
        if len(set(steps)) < len(steps):
            raise ValueError(f"stages: must begin at different steps, received {steps}")
        return self


class SessionsConfig(MixtureSourceConfig):
    """One source of sessions."""

    path: str
    """A run directory or its trajectory log; an ATIF JSON file or a directory of them; or a JSONL file of
    chats, each with `messages`."""
    min_reward: float | None = None
    """Sessions with a lower reward, or without one, are left out. Unset: all are used."""


class SftConfig(MixtureConfig):
    """`etude sft`: next-token training on recorded agent sessions."""

    sources: dict[str, SessionsConfig] = Field(default_factory=dict[str, SessionsConfig])
    """By name: `[sft.sources.NAME]`."""
    observation_weight: float = Field(default=0.0, ge=0)
    """Loss weight of prompts and tool results, relative to the agent's own tokens; 0 masks them out."""

    @model_validator(mode="after")
    def _fits_together(self) -> SftConfig:
        check_weights(self.sources)
        return self


def check_weights(sources: Mapping[str, MixtureSourceConfig]) -> None:
    """Raises ValueError for names that are no TOML keys, and if no source has a weight above 0."""
    check_names("sources", sources)
    if sources and not any(source.weight for source in sources.values()):
        raise ValueError("sources: at least one needs a weight above 0")


def check_names(field: str, names: Iterable[str]) -> None:
    """Raises ValueError for names that would need quotes in TOML."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{field}: a name has letters, digits, - and _ only, received {name!r}")
