"""Joins a run: sets up a cluster from the address of the run's control API and plays its sessions."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config import RunConfig, load_config
from etude.controller.backends import open_run_backend
from etude.controller.clusters.client import BACKOFF, ControlClient, ControlLostError, unless
from etude.controller.clusters.sampling import OVER, ClusterResources, SamplingCluster, SamplingCounts, Terms
from etude.controller.clusters.wire import API, RunFingerprint
from etude.controller.compute import resolve_numerics, use_sampling_threads
from etude.controller.engines import SampledModel, make_local_service
from etude.environment.episodes import Environment, EpisodeLimits
from etude.errors import ConfigError, InfrastructureError, SamplerError
from etude.kit.retry import retry_async
from etude.observe import Observer
from etude.store.blobs import MemoryBlobs
from etude.tokens.tokenizer import Tokenizer
from etude.weights import make_subscriber
from etude.weights.ending import EndMark
from etude.weights.folders import UnavailableError, open_folder
from etude.weights.opening import check_reading, open_reading


async def sample(
    client: ControlClient,
    name: str,
    overrides: Sequence[str],
    observer: Observer,
    draining: asyncio.Event,
    *,
    patience_s: float = 600.0,
    drain_s: float = 60.0,
    trajectories_url: str = "",
    wait: bool = False,
) -> SamplingCounts:
    """Plays sessions of the run at `client` until it has ended, or `draining` is set and they have finished.

    `overrides`: of those keys of the run's configuration that do not determine a session's content:
    `weights.*`, `engine.*`, `sandbox.backend`. `patience_s`: how long the run may be unreachable, and weights
    may fail to come. `trajectories_url`: address of the run's trajectory store from here, where it differs
    from the run's own. `wait`: waits for a run that does not answer even where the weight store says that its
    last run has ended.

    Raises ConfigError for what does not fit the run or this machine, StoreError for weights that cannot be
    read here, ControlLostError, WeightsLostError, SamplerError.
    """
    mark = None if wait else _end_mark(overrides)
    run = await unless(draining, _ask_description(client, patience_s, name, observer, mark))
    if run is None:
        return SamplingCounts()
    with tempfile.TemporaryDirectory(prefix="etude-sample-") as directory:
        config, tokenizer, model = configure_from_run(run, Path(directory), overrides)
    store_url = trajectories_url or run["trajectories_url"]
    store = open_folder(store_url) if store_url and run["trajectories_url"] else None
    terms = Terms(run["lease_s"], run["poll_s"], run["max_result_bytes"], store)
    with contextlib.suppress(UnavailableError):  # a relay that is not up yet; a wrong token stays wrong
        await unless(draining, asyncio.to_thread(check_reading, config.weights))
    async with open_resources(config, tokenizer, model, name) as resources:
        # The run would refuse it, too: its sessions would differ.
        RunFingerprint(run["fingerprint"]).check(resources.fingerprint.parts, name)
        cluster = SamplingCluster(client, name, resources, terms, observer, patience_s, drain_s, mark)
        await cluster.play(draining)
    return cluster.counts


def _end_mark(overrides: Sequence[str]) -> EndMark | None:
    """The mark of the run's end, in the weight store that `overrides` name; None where they name none."""
    weights = load_config(None, [text for text in overrides if text.startswith("weights.")]).weights
    if not weights.read_url and not weights.url:
        return None
    return EndMark(open_reading(weights))


async def _ask_description(
    client: ControlClient, patience_s: float, name: str, observer: Observer, mark: EndMark | None
) -> dict[str, Any] | None:
    """The run's description; waits for a run that has not started. None where it has ended."""
    says_that_it_waits = patience_s > 0

    async def ask() -> dict[str, Any] | None:
        try:
            return await client.run()
        except ControlLostError:
            if mark is not None and await mark.is_set():
                return None
            raise

    def on_failure(failure: ControlLostError, pause_s: float | None) -> None:
        nonlocal says_that_it_waits
        if says_that_it_waits:
            observer.say(f"{name}: waits up to {patience_s:g} s for a run at {client.url}")
        says_that_it_waits = False

    backoff = dataclasses.replace(BACKOFF, within_s=patience_s)
    run = await retry_async(ask, ControlLostError, backoff, on_failure=on_failure)
    if run is not None and run.get("api") != API:
        raise ConfigError(
            f"uses version {run.get('api')} of the control API, and this program version {API}",
            field="control",
            received=client.url,
            fix="install the run's version here",
        )
    if run is None or run.get("finished"):
        observer.say(f"{name}: {OVER}")
        return None
    return run


def configure_from_run(
    run: Mapping[str, Any], directory: Path, overrides: Sequence[str]
) -> tuple[RunConfig, Tokenizer, SampledModel]:
    """The run's resolved configuration with this cluster's overrides, its tokenizer and its model."""
    try:
        (directory / "run.toml").write_text(run["config"], encoding="utf-8")
        for file, text in run["tokenizer"].items():
            (directory / Path(file).name).write_text(text, encoding="utf-8")
        vocab_size = int(run["vocab_size"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InfrastructureError(f"the run's description is invalid: {error!r}", field="control") from error
    config = load_config(directory / "run.toml", overrides)
    if not config.weights.read_url and not config.weights.url:
        raise ConfigError(
            "is empty, as is weights.url: there is no source of weights",
            field="weights.read_url",
            fix="give --set weights.read_url=http://HOST:PORT, a relay of this cluster (`etude relay`)",
        )
    if config.executor != "local":
        raise ConfigError(
            "must be 'local': a cluster's engine is in the process of its sessions",
            field="executor",
            received=config.executor,
            fix="start `etude sample` once for each engine, each with its own name",
        )
    config, tokenizer = resolve_numerics(config), Tokenizer.load(directory)
    model = SampledModel.configured(config, tokenizer)
    return config, tokenizer, dataclasses.replace(model, vocab_size=vocab_size)


@contextlib.asynccontextmanager
async def open_resources(
    config: RunConfig, tokenizer: Tokenizer, model: SampledModel, name: str
) -> AsyncIterator[ClusterResources]:
    """Opens a cluster's engine and sandboxes; stops them at exit. No weights are in service yet.

    Raises ResourceError, ConfigError where they cannot be opened here.
    """
    use_sampling_threads(config)
    async with contextlib.AsyncExitStack() as stack:
        backend = open_run_backend(config.sandbox, f"cluster/{name}")
        stack.push_async_callback(backend.close)
        blobs, limits = MemoryBlobs(), EpisodeLimits.from_config(config)
        environment = Environment.of_run(config, tokenizer, backend, limits, blobs.put)
        stack.push_async_callback(environment.close)
        subscriber = make_subscriber(config.weights)
        async with make_local_service(config, tokenizer, model, subscriber.fetch, None) as service:

            def check() -> None:
                if service.failure is not None:
                    raise SamplerError("the engine has failed", received=repr(service.failure))

            yield ClusterResources(
                environment,
                service,
                service,
                blobs,
                RunFingerprint.of(config, environment.renderer),
                config.engine.num_slots,
                config.rl.kv_on_update,
                check,
                subscriber,
                config.weights.read_url or config.weights.url,
            )
