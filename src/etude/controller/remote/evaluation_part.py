"""Evaluation in a process of its own: an engine, sandboxes and the held-out tasks, for one version at a time.

The engine serves nothing but the version that is judged, on its reproducible schedule: the figures are those
of these weights alone, however far training has come meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.agent import open_renderer
from etude.config import RunConfig
from etude.controller.backends import open_run_backend
from etude.controller.engines import SampledModel
from etude.controller.remote.engine_part import make_service
from etude.environment.episodes import Environment, EpisodeLimits
from etude.errors import SamplerError
from etude.evaluation import evaluate_policy
from etude.inference.exchange import Build
from etude.records import PolicyVersion, Task, WeightManifest
from etude.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Judged:
    """A version's figures."""

    version: PolicyVersion
    figures: dict[str, float]
    """Pass rates: `greedy`, and `pass_rate` at temperature 1."""
    sampled_by: tuple[str, ...]
    """The versions of all tokens at temperature 1."""


class EvaluationPart:
    """Judges versions, one after the other. For one event loop; `begin` comes first."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        weights: Path,
        limits: EpisodeLimits,
        owner: str,
        model: SampledModel | None = None,
    ) -> None:
        """`weights`, `model`: see EnginePart; `owner`: see RolloutPart. Raises ResourceError where no
        sandboxes can be made here."""
        self._config = config
        self._service = make_service(config, tokenizer, weights, config.engine.tool_delay_steps, model)
        self._backend = open_run_backend(config.sandbox, owner)
        renderer = open_renderer(tokenizer, config.agent)
        self._environment = Environment(self._backend, renderer, limits, config.rl.reward, keep_routes=None)

    async def begin(self) -> Build:
        """Starts the engine's loop."""
        await self._service.__aenter__()
        return Build.here(self._config.model)

    async def pulse(self) -> None:
        """Returns if all is well. Raises SamplerError where the engine has failed."""
        if self._service.failure is not None:
            raise SamplerError("the engine has failed", received=repr(self._service.failure))

    async def judge(self, manifest: WeightManifest, tasks: Sequence[Task]) -> Judged:
        """The version's figures on the tasks. Raises WeightUpdateError for weights that are not there any
        more, InfrastructureError if most sessions failed."""
        await self._service.stage(manifest)
        await self._service.activate(manifest.version, "recompute")
        config = self._config
        name = f"{config.name}-step{manifest.version.step}"
        evaluation = await evaluate_policy(
            self._environment, self._service, tasks, name, config.seed, config.engine.num_slots
        )
        figures = {
            "pass_rate": evaluation.sampled["pass_rate"],
            "greedy": evaluation.greedy["pass_rate"],
        }
        spans = (span for t in evaluation.trajectories for s in t.segments for span in s.version_spans)
        return Judged(manifest.version, figures, tuple(sorted({str(span.version) for span in spans})))

    async def close(self) -> None:
        """Ends the engine's loop and the sandboxes."""
        await self._service.__aexit__(None, None, None)
        await self._backend.close()
