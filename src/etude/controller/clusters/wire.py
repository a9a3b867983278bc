"""The control API between a run and its clusters: routes and JSON documents.

    GET  /v1/run                describes the run: configuration, tokenizer, fingerprint; whether it has ended
    POST /v1/join               registers a cluster: name, fingerprint            -> its id
    POST /v1/beat               heartbeat: tokens by lease, trouble with weights  -> leases no longer valid
    GET  /v1/manifest           manifest of the weights in service (long poll)
    POST /v1/claim              claims sessions (long poll)                       -> leases
    PUT  /v1/leases/ID/session  uploads a finished session, or names its object   -> accepted or why not
    POST /v1/leases/ID/failure  reports a session that could not be run
    POST /v1/leave              unregisters the cluster

Everything but `/health` asks for the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from etude.agent.tools.registry import schemas_digest
from etude.config import RlConfig, RunConfig, SandboxConfig, dump_config
from etude.environment.runners import EpisodeRequest
from etude.environment.wire import task_document, task_of
from etude.errors import ConfigError, InfrastructureError
from etude.inference.exchange import Build
from etude.records import PolicyVersion, SamplingParams, TrajectoryId
from etude.tokens.renderer import Renderer

API = 4
"""Version of this protocol: each side refuses any other."""

_SHARED = ("name", "seed", "num_threads", "device", "dtype", "numerics", "tokenizer", "model", "agent")
"""Keys of a run's configuration that clusters adopt, besides parts of `sandbox`, `engine` and `rl`."""
_LOCAL_SANDBOX = {"backend", "server", "token", "servers", "servers_file", "patience_s"}


@dataclass(frozen=True, slots=True)
class RunFingerprint:
    """What determines a session's exact output, by name: processes that differ in a part play differently."""

    parts: Mapping[str, str]

    @staticmethod
    def of(config: RunConfig, renderer: Renderer) -> RunFingerprint:
        """The fingerprint of this process under a resolved configuration."""
        sandbox = config.sandbox.model_dump_json(exclude=_LOCAL_SANDBOX)
        return RunFingerprint(
            {
                **Build.here(config.model).parts,
                "tokenizer": renderer.tokenizer.digest,
                "template": renderer.template_digest,
                "tools": schemas_digest(renderer.grammar.tools),
                "agent": config.agent.model_dump_json(),
                "sandbox": sandbox,
                "reward": config.rl.reward.model_dump_json(),
                "numerics": config.numerics,
            }
        )

    def check(self, found: Mapping[str, str], name: str) -> None:
        """Raises ConfigError where `found`, the fingerprint of the cluster `name`, differs."""
        differing = sorted(
            key for key in {*self.parts, *found} if self.parts.get(key, "") != found.get(key, "")
        )
        if differing:
            shown = (f"{k}: {_short(self.parts, k)} in the run, {_short(found, k)} here" for k in differing)
            raise ConfigError(
                f"the cluster {name} would not play the same sessions as the run",
                field=differing[0],
                received="; ".join(shown),
                fix="install the run's versions, and override no setting that affects sessions",
            )


def _short(parts: Mapping[str, str], key: str) -> str:
    value = parts.get(key, "nothing")
    return value if len(value) <= 40 else f"{blake3(value.encode()).hexdigest()[:12]} (digest)"


def config_document(config: RunConfig) -> str:
    """A resolved configuration as sent to clusters: without keys that concern the run's process alone."""
    taken = {name: getattr(config, name) for name in _SHARED}
    defaults = SandboxConfig()
    own = {name: getattr(defaults, name) for name in _LOCAL_SANDBOX - {"backend"}}
    taken["sandbox"] = config.sandbox.model_copy(update=own)
    taken["engine"] = config.engine
    if config.engine.drafts == "mtp":  # their layers lie in the run's checkpoint
        taken["engine"] = config.engine.model_copy(update={"drafts": "ngram", "speculative_tokens": 0})
    taken["rl"] = RlConfig(reward=config.rl.reward, kv_on_update=config.rl.kv_on_update)
    return dump_config(RunConfig().model_copy(update=taken))


def order_document(request: EpisodeRequest) -> dict[str, Any]:
    """A session to play, as JSON."""
    return {
        "task": task_document(request.task),
        "id": list(asdict(request.identity).values()),
        "rng_key": list(request.rng_key),
        "params": asdict(request.params),
        "training": request.training,
    }


def order_of(raw: Mapping[str, Any]) -> EpisodeRequest:
    """Reads what `order_document` wrote. Raises InfrastructureError for anything else."""
    try:
        return EpisodeRequest(
            task_of(raw["task"]),
            TrajectoryId(*raw["id"]),
            tuple(int(part) for part in raw["rng_key"]),
            SamplingParams(**raw["params"]),
            bool(raw["training"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InfrastructureError(f"the run sent an invalid session: {error!r}", field="claim") from error


def version_key(version: PolicyVersion | None) -> str:
    """A key that distinguishes versions, even those with equal weights; empty for none."""
    return "" if version is None else f"{version}:{version.digest}"
