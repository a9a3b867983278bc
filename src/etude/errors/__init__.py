"""The exception hierarchy of Étude.

    EtudeError
    ├── UserError                 something that the user can correct
    │   ├── ConfigError           a key, a value, a combination of values
    │   │   └── UnknownKeyError   a key that this version does not know
    │   ├── RunDirectoryError     a run directory that exists, is missing or belongs to other code
    │   ├── ResourceError         too little memory or disk, a kernel feature that is switched off
    │   ├── CheckpointError       a checkpoint that is damaged, half-written or of another architecture
    │   └── TaskError             a task directory that breaks its format
    ├── AgentError                a mistake of the *agent*: a real outcome, it stays in the batch
    │   ├── MalformedCallError    a tool call that does not parse
    │   ├── ToolArgumentError     a tool call that parses and makes no sense
    │   └── UserAbortedError      the user refused a call or gave no answer
    └── InfrastructureError       a failure of *ours*: never a reward, retried and counted
        ├── SandboxError          a sandbox that could not be created, died or does not answer
        ├── SamplerError          the engine failed or no longer holds state that a request names
        │   └── PrefixMissError   the engine does not hold the named prefix: send all tokens again
        ├── PartLostError         a process that held a part of the run died or does not answer
        ├── RankError             a rank of distributed training died, hangs or diverged from the others
        ├── StoreError            the trajectory store or the weight store failed
        ├── WeightUpdateError     a weight update whose base, digest or shape does not fit
        ├── RouteReplayError      expert routes that were replayed twice, or not at all
        └── ParityError           trainer and engine give the same tokens other log-probabilities

An error names the invalid field, the received value and a fix.
"""

from __future__ import annotations


class EtudeError(Exception):
    """Base class. `field` names what is invalid, `received` is its value, `fix` how to correct it."""

    def __init__(
        self, message: str, *, field: str | None = None, received: object = None, fix: str | None = None
    ) -> None:
        self.message = message
        self.field = field
        self.received = received
        self.fix = fix
        super().__init__(message, field, received, fix)

    def __str__(self) -> str:
        parts = [f"{self.field}: {self.message}" if self.field else self.message]
        if self.received is not None:
            parts.append(f"received {self.received!r}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles all fields, so that they are kept across processes."""
        return _rebuild, (type(self), self.message, self.field, self.received, self.fix)


def _rebuild(
    kind: type[EtudeError], message: str, field: str | None, received: object, fix: str | None
) -> EtudeError:
    return kind(message, field=field, received=received, fix=fix)


class UserError(EtudeError):
    """Something that the user can correct: printed without a traceback."""


class ConfigError(UserError):
    """A key, a value or a combination of values in a configuration."""


class UnknownKeyError(ConfigError):
    """A key that this version does not know: mistyped, or of another version."""


class RunDirectoryError(UserError):
    """A run directory that exists already, is missing or was written by something else."""


class ResourceError(UserError):
    """This machine lacks memory, disk or a kernel feature."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, half-written or of another architecture."""


class TaskError(UserError):
    """A task that breaks its format."""


class AgentError(EtudeError):
    """A mistake of the agent: an outcome, shown to the agent, kept in the batch."""


class MalformedCallError(AgentError):
    """A tool call that does not parse."""


class ToolArgumentError(AgentError):
    """A tool call that parses and asks for something impossible."""


class UserAbortedError(AgentError):
    """The user refused a call, stopped it, or gave no answer."""


class InfrastructureError(EtudeError):
    """A failure of the system: never a reward; classified, retried and counted."""


class SandboxError(InfrastructureError):
    """A sandbox could not be created, died or does not answer."""


class SamplerError(InfrastructureError):
    """The inference engine failed."""


class PrefixMissError(SamplerError):
    """The engine does not hold the prefix that the request names: send all tokens again."""


class PartLostError(InfrastructureError):
    """The process that held a part of the run died or does not answer: what it had in memory is lost."""


class RankError(InfrastructureError):
    """A rank of distributed training died, does not answer, or failed where the others did not."""


class StoreError(InfrastructureError):
    """A durable store could not be read or written."""


class WeightUpdateError(InfrastructureError):
    """A weight update whose base, digest or shapes do not fit what is loaded."""


class RouteReplayError(InfrastructureError):
    """Expert routes were replayed twice, or not at all: each record belongs to exactly one update."""


class ParityError(InfrastructureError):
    """Trainer and engine give the same tokens, under the same weights, too different log-probabilities."""
