"""Typed configuration: defaults < TOML file < dotted overrides. Imports neither torch nor ray."""

from etude.config.adapter import AdapterConfig
from etude.config.base import Section
from etude.config.checkpoint import CheckpointConfig
from etude.config.engine import EngineConfig
from etude.config.loading import dump_config, load_config, parse_config
from etude.config.midtraining import MidtrainConfig
from etude.config.model import ModelConfig, TokenizerConfig
from etude.config.optimizer import OptimizerConfig
from etude.config.parallel import ParallelConfig
from etude.config.parity import ParityConfig
from etude.config.pretraining import (
    DraftsConfig,
    MixtureConfig,
    MixtureSourceConfig,
    NextTokenConfig,
    PretrainConfig,
    SessionsConfig,
    SftConfig,
    SourceConfig,
    StageConfig,
)
from etude.config.reinforcement import (
    Baseline,
    CorrectionConfig,
    FeedbackConfig,
    LossConfig,
    Normalizer,
    RewardConfig,
    RlConfig,
    StreamConfig,
)
from etude.config.run import (
    AgentConfig,
    EvaluationConfig,
    RunConfig,
    SandboxConfig,
    TasksConfig,
)

__all__ = [
    "AdapterConfig",
    "AgentConfig",
    "Baseline",
    "CheckpointConfig",
    "CorrectionConfig",
    "DraftsConfig",
    "EngineConfig",
    "EvaluationConfig",
    "FeedbackConfig",
    "LossConfig",
    "MidtrainConfig",
    "MixtureConfig",
    "MixtureSourceConfig",
    "ModelConfig",
    "NextTokenConfig",
    "Normalizer",
    "OptimizerConfig",
    "ParallelConfig",
    "ParityConfig",
    "PretrainConfig",
    "RewardConfig",
    "RlConfig",
    "RunConfig",
    "SandboxConfig",
    "Section",
    "SessionsConfig",
    "SftConfig",
    "SourceConfig",
    "StageConfig",
    "StreamConfig",
    "TasksConfig",
    "TokenizerConfig",
    "dump_config",
    "load_config",
    "parse_config",
]
