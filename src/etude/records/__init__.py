"""The nouns of the system: what crosses from one part to another. Standard library and numpy only."""

from etude.records.policy import (
    ADAPTER_PREFIX,
    UNKNOWN_FORMAT,
    BlobRef,
    PolicyVersion,
    TensorEntry,
    WeightManifest,
)
from etude.records.reward import FeedbackEvent, RewardBreakdown
from etude.records.sampling import NATIVE_ROUTE, SampleChunk, SampleRequest, SamplingParams, Scores
from etude.records.task import (
    Artifact,
    CollectCommand,
    HealthCheck,
    SolutionScript,
    Task,
    TaskImage,
    TaskMachine,
    TaskStep,
    TestScript,
)
from etude.records.trajectory import (
    Group,
    GroupOrigin,
    Relation,
    Segment,
    Status,
    Trajectory,
    TrajectoryId,
    TurnSpan,
    VersionSpan,
)
from etude.records.turn import ToolCall, ToolErrorClass, ToolResult, Turn

__all__ = [
    "ADAPTER_PREFIX",
    "NATIVE_ROUTE",
    "UNKNOWN_FORMAT",
    "Artifact",
    "BlobRef",
    "CollectCommand",
    "FeedbackEvent",
    "Group",
    "GroupOrigin",
    "HealthCheck",
    "PolicyVersion",
    "Relation",
    "RewardBreakdown",
    "SampleChunk",
    "SampleRequest",
    "SamplingParams",
    "Scores",
    "Segment",
    "SolutionScript",
    "Status",
    "Task",
    "TaskImage",
    "TaskMachine",
    "TaskStep",
    "TensorEntry",
    "TestScript",
    "ToolCall",
    "ToolErrorClass",
    "ToolResult",
    "Trajectory",
    "TrajectoryId",
    "Turn",
    "TurnSpan",
    "VersionSpan",
    "WeightManifest",
]
