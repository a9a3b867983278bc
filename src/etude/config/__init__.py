"""Typed configuration: defaults < TOML file < dotted overrides. Imports neither torch nor ray."""

from etude.config.adapter import AdapterConfig
from etude.config.base import Section
from etude.config.checkpoint import CheckpointConfig
from etude.config.cluster import ClusterConfig, PartConfig
from etude.config.clusters import ClustersConfig
from etude.config.elastic import ElasticConfig
from etude.config.engine import EngineConfig
from etude.config.forks import ForkConfig, ForkTurn
from etude.config.harness import HarnessConfig
from etude.config.loading import (
    drop_key,
    dump_config,
    load_config,
    load_section,
    parse_config,
    parse_section,
    read_toml,
)
from etude.config.mcp import McpConfig
from etude.config.midtraining import MidtrainConfig
from etude.config.model import ModelConfig, TokenizerConfig
from etude.config.monitors import MonitorConfig
from etude.config.optimizer import OptimizerConfig
from etude.config.parallel import ParallelConfig
from etude.config.parity import ParityConfig
from etude.config.plan import PlanConfig
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
    CurriculumConfig,
    FeedbackConfig,
    LossConfig,
    Normalizer,
    RlConfig,
    StreamConfig,
)
from etude.config.reward import LengthConfig, RewardConfig
from etude.config.routing import RouterConfig
from etude.config.run import (
    QUICKSTART_FAMILY,
    SEARCHING,
    AgentConfig,
    EvaluationConfig,
    GrammarName,
    IndexName,
    RunConfig,
    TasksConfig,
    TemplateName,
)
from etude.config.sandbox import SandboxConfig, SandboxServerConfig, ServersFile
from etude.config.weights import WeightsConfig

__all__ = [
    "QUICKSTART_FAMILY",
    "SEARCHING",
    "AdapterConfig",
    "AgentConfig",
    "Baseline",
    "CheckpointConfig",
    "ClusterConfig",
    "ClustersConfig",
    "CorrectionConfig",
    "CurriculumConfig",
    "DraftsConfig",
    "ElasticConfig",
    "EngineConfig",
    "EvaluationConfig",
    "FeedbackConfig",
    "ForkConfig",
    "ForkTurn",
    "GrammarName",
    "HarnessConfig",
    "IndexName",
    "LengthConfig",
    "LossConfig",
    "McpConfig",
    "MidtrainConfig",
    "MixtureConfig",
    "MixtureSourceConfig",
    "ModelConfig",
    "MonitorConfig",
    "NextTokenConfig",
    "Normalizer",
    "OptimizerConfig",
    "ParallelConfig",
    "ParityConfig",
    "PartConfig",
    "PlanConfig",
    "PretrainConfig",
    "RewardConfig",
    "RlConfig",
    "RouterConfig",
    "RunConfig",
    "SandboxConfig",
    "SandboxServerConfig",
    "Section",
    "ServersFile",
    "SessionsConfig",
    "SftConfig",
    "SourceConfig",
    "StageConfig",
    "StreamConfig",
    "TasksConfig",
    "TemplateName",
    "TokenizerConfig",
    "WeightsConfig",
    "drop_key",
    "dump_config",
    "load_config",
    "load_section",
    "parse_config",
    "parse_section",
    "read_toml",
]
