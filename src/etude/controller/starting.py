"""Checks of a configuration before a run gets a directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from etude.agent.index.opening import check_run_index
from etude.config import AgentConfig, RunConfig
from etude.controller.agent.models import describe_unknown
from etude.controller.arrangement import check_executor
from etude.controller.backends import check_run_backend, open_run_backend
from etude.controller.clusters.runner import check_clusters
from etude.controller.compute import choose_device, choose_place, choose_weight_dtype, resolve_numerics
from etude.controller.engines import check_engine
from etude.controller.families import open_family
from etude.controller.harness import check_harness
from etude.controller.models import check_format, resolve_model
from etude.controller.planning import check_machine
from etude.environment.origins import Origin, task_origin
from etude.environment.rewards import check_reward
from etude.inference.vllm import check_vllm
from etude.kit.secrets import read_secret
from etude.observe import Observer
from etude.records import Task
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from etude.training.parallel.division import check_division
from etude.weights import check_store


def check_start(config: RunConfig, observer: Observer | None = None) -> None:
    """Checks, before a run directory is made, whatever would make the run fail later. `observer`: shows the
    progress of checking a directory's tasks.

    Raises ConfigError for an initial checkpoint that is none, does not fit or has another chat format,
    experts that cannot be divided so, a term of the reward that cannot be computed, sandboxes in which a
    foreign harness cannot run, vLLM that is neither installed nor named, a Ray cluster or any sandbox server
    that does not answer; StoreError for a weight store whose scheme is not known, that does not answer or
    cannot be written; ResourceError for a device, kernels or sandboxes that are not available, or parts that
    do not fit this machine.
    """
    config = resolve_numerics(resolve_model(config))
    check_format(config)
    check_division(config.model, config.parallel)
    if not config.rl.stream.source:  # what was recorded was graded then
        check_reward(config.rl.reward)
        open_family(config, observer)
        check_run_backend(config.sandbox)
        check_harness(config)
        check_run_index(config.agent.index)
        if config.engine.backend == "etude":
            check_engine(config)
    check_store(config.weights)
    check_clusters(config.clusters)
    if config.elastic.router:
        read_secret(config.elastic.token, "elastic.token")
    if config.executor == "ray":
        check_executor(config)
    if config.engine.backend == "vllm":
        on_cluster = config.executor == "ray" and bool(config.cluster.address)
        check_vllm(config.engine.vllm, is_here=not on_cluster)
        choose_device(config.device, config.numerics)
    else:
        place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
        choose_weight_dtype(config.engine.weight_dtype, place)
        if config.plan.enforce:
            check_machine(config, place)


def resolve_run_servers(config: RunConfig) -> RunConfig:
    """The configuration with its MCP servers' tools. Starts each server once: those of sandboxes among the
    files of the run's first task.

    Raises InfrastructureError for a server that does not start or answer, ConfigError for tools that it does
    not have, ResourceError where sandboxes are not available.
    """
    if not config.agent.mcp:
        return config
    agent = resolve_servers(
        config.agent, lambda: open_run_backend(config.sandbox), lambda: open_family(config).source()(0)
    )
    return config.model_copy(update={"agent": agent})


def resolve_servers(
    agent: AgentConfig, open_backend: Callable[[], SandboxBackend], find_task: Callable[[], Task | None]
) -> AgentConfig:
    """The section `agent` with its MCP servers' tools. `find_task`: the task in whose sandbox they are
    started. Raises as `resolve_run_servers`."""
    unknown = [server for server in agent.mcp.values() if not server.described]
    if not unknown:
        return agent
    in_sandbox = any(server.is_in_sandbox for server in unknown)
    task = find_task() if in_sandbox else None
    origin = Origin(Template()) if task is None else task_origin(task, Resources())

    async def ask() -> AgentConfig:
        if not in_sandbox:
            return agent.model_copy(update={"mcp": await describe_unknown(agent.mcp)})
        backend = open_backend()
        try:
            sandbox = await origin.make(backend)
            return agent.model_copy(update={"mcp": await describe_unknown(agent.mcp, sandbox)})
        finally:
            await backend.close()

    return asyncio.run(ask())
