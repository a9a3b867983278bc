"""Typed configuration: defaults < TOML file < dotted overrides. Imports neither torch nor ray."""

from etude.config.base import Section
from etude.config.loading import dump_config, load_config, parse_config
from etude.config.model import ModelConfig, TokenizerConfig
from etude.config.run import (
    AgentConfig,
    CheckpointConfig,
    EngineConfig,
    EvaluationConfig,
    RunConfig,
    SandboxConfig,
    TasksConfig,
)
from etude.config.training import LossConfig, MidtrainConfig, OptimizerConfig, RewardConfig, RlConfig

__all__ = [
    "AgentConfig",
    "CheckpointConfig",
    "EngineConfig",
    "EvaluationConfig",
    "LossConfig",
    "MidtrainConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RlConfig",
    "RunConfig",
    "SandboxConfig",
    "Section",
    "TasksConfig",
    "TokenizerConfig",
    "dump_config",
    "load_config",
    "parse_config",
]
