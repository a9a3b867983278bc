"""Estimates the memory of one process of a run, part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

from etude.config import RunConfig
from etude.controller.compute import Place, choose_weight_dtype
from etude.controller.planning.sizes import ModelSizes
from etude.inference.cache import PAGE_TOKENS, cache_type, page_bytes
from etude.model.logprobs import block_rows
from etude.observe.machine import available_cores
from etude.weights.memory import KEPT_VERSIONS

SERVED, PACKED, PAGES = "engine's weights", "packed weights", "keys and values"
"""Names of the engine's parts."""
STORE_COPIES = 2
"""Copies of published weights on either side of a store: the last version and the next."""
_FLOAT_BYTES = 4
_BLOCK_LOGITS = 2
"""Blocks of logits in memory at once: the logits and their gradient."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory, on the device that holds most of it."""

    name: str
    num_bytes: float
    why: str


def published_bytes(config: RunConfig, place: Place) -> int:
    """Bytes of one element of the weights as published to the engines."""
    return 2 if config.weights.url and config.weights.dtype == "bfloat16" else place.element_bytes


def publishes_in_parts(config: RunConfig) -> bool:
    """Whether each rank publishes its own shards."""
    return config.parallel.ranks > 1 and bool(config.weights.url)


def trainer_parts(config: RunConfig, sizes: ModelSizes, vocab_size: int, place: Place) -> list[MemoryPart]:
    """Memory of one rank of the trainer. On a GPU, without host memory."""
    element_bytes, mesh = place.element_bytes, config.parallel
    experts = sizes.expert_parameters
    held = (sizes.parameters - experts) / mesh.fsdp + experts / (mesh.fsdp * mesh.expert)
    held /= mesh.tensor
    cut = _cut(config)
    optimizer = _optimizer(config, sizes, held, cut)
    batches = _count_at_once(config, sizes, place)
    rows = min(sizes.saved_tokens, block_rows(vocab_size, place.device))
    logits = batches * (_BLOCK_LOGITS * rows * vocab_size * _FLOAT_BYTES / mesh.tensor)
    micro_batches = f"{batches * sizes.saved_tokens:,.0f} tokens"
    kept = "inputs of each block" if config.activation_checkpointing else "all that the backward pass needs"
    # An upper bound under tensor parallelism: activations between layers are not divided.
    parts = [
        MemoryPart("weights", held * element_bytes, f"the trainer's own{cut}"),
        _gradients(sizes, held, cut, element_bytes, batches),
        optimizer,
        MemoryPart("activations", batches * sizes.saved_bytes / mesh.context, f"{micro_batches}: {kept}"),
        MemoryPart("logits", logits, "blocks and their gradient, float32"),
    ]
    if config.rl.loss.kl_weight > 0 and not sizes.adapter_parameters:
        parts.append(MemoryPart("reference", held * element_bytes, "reference weights of the KL divergence"))
    if mesh.ranks > 1 and not publishes_in_parts(config):
        whole = sizes.parameters * element_bytes
        parts.append(MemoryPart("gathered weights", whole, "the whole model, while it is published"))
    if place.device == "cpu":
        parts += _host_copies(config, sizes, place, held, optimizer)
    return parts


def _count_at_once(config: RunConfig, sizes: ModelSizes, place: Place) -> float:
    """Number of micro-batches whose activations a rank holds at once: with one rank on a CPU one per thread,
    as far as a step's longest sessions fill them."""
    if place.device != "cpu" or config.parallel.ranks > 1:
        return 1
    rl, threads = config.rl, config.num_threads or available_cores()
    step_tokens = rl.groups_per_step * rl.group_size * config.agent.max_tokens
    return max(1.0, min(threads, step_tokens / rl.updates_per_step / sizes.saved_tokens))


def engine_parts(config: RunConfig, sizes: ModelSizes, place: Place) -> list[MemoryPart]:
    """Memory of one engine. On a GPU, without host memory."""
    cache_dtype = cache_type(config.engine.cache_dtype, place.kernels, place.dtype)
    longest = config.agent.max_tokens + 1
    tokens = config.engine.cache_tokens or config.engine.num_slots * longest
    pages = -(-tokens // PAGE_TOKENS)
    num_bytes = sizes.parameters * place.element_bytes
    parts = [MemoryPart(SERVED, 2 * num_bytes, "in service, and the next ones")]
    if sizes.adapter_parameters:
        parts = [MemoryPart(SERVED, num_bytes, "in service, under all versions of the adapter")]
    if place.kernels == "native":
        packed = choose_weight_dtype(config.engine.weight_dtype, place)
        num_bytes = 2 * sizes.packed_parameters * (2 if packed == "bfloat16" else _FLOAT_BYTES)
        parts.append(MemoryPart(PACKED, num_bytes, f"matrices in the native kernels' layout, {packed}"))
    why = f"{tokens:,} tokens in {cache_dtype}, if all are in use"
    parts.append(MemoryPart(PAGES, pages * page_bytes(config.model, cache_dtype), why))
    if place.device == "cpu" and (fetched := _fetched(config, sizes, place)):
        parts.append(fetched)
    return parts


def _optimizer(config: RunConfig, sizes: ModelSizes, held: float, cut: str) -> MemoryPart:
    settings = config.rl.optimizer
    if sizes.adapter_parameters:
        states = 2.0 * sizes.adapter_parameters
    else:
        muon = sizes.matrix_parameters if settings.matrix_optimizer == "muon" else 0
        states = held * (2 - muon / sizes.parameters)
    state_bytes = 2 if settings.state_dtype == "bfloat16" else _FLOAT_BYTES
    return MemoryPart("optimizer", states * state_bytes, f"{settings.state_dtype} moments{cut}")


def _gradients(sizes: ModelSizes, held: float, cut: str, element_bytes: int, batches: float) -> MemoryPart:
    """Memory of gradients: their sum, and those of each micro-batch where several are computed at once."""
    sets = 1 if batches == 1 else 1 + math.ceil(batches)
    each = f": their sum, and of {sets - 1} micro-batches" if sets > 1 else ""
    if adapters := sizes.adapter_parameters:
        return MemoryPart("gradients", sets * adapters * _FLOAT_BYTES, f"of the adapters{each}")
    return MemoryPart("gradients", sets * held * element_bytes, f"of every weight{cut}{each}")


def _host_copies(
    config: RunConfig, sizes: ModelSizes, place: Place, held: float, optimizer: MemoryPart
) -> list[MemoryPart]:
    """Copies that a rank holds in host memory."""
    parts: list[MemoryPart] = []
    published = sizes.parameters * published_bytes(config, place)
    if config.weights.url and not config.weights.scratch:
        share = published / (config.parallel.ranks if publishes_in_parts(config) else 1)
        parts.append(
            MemoryPart("published weights", STORE_COPIES * share, "the last version and the one in transfer")
        )
    elif not config.weights.url and config.executor == "local" and not config.rl.stream.source:
        kept = KEPT_VERSIONS * published
        parts.append(MemoryPart("published weights", kept, f"the last {KEPT_VERSIONS} versions"))
    if config.checkpoint.asynchronous:
        trained = sizes.adapter_parameters * _FLOAT_BYTES or held * place.element_bytes
        copied = trained + optimizer.num_bytes
        parts.append(MemoryPart("checkpoint", copied, "copies of weights and moments while it is written"))
    return parts


def _fetched(config: RunConfig, sizes: ModelSizes, place: Place) -> MemoryPart | None:
    """Versions that an engine holds in host memory to stage from."""
    one = sizes.parameters * published_bytes(config, place)
    reads_store = config.is_apart or config.parallel.ranks > 1 or bool(config.weights.read_url)
    if config.weights.url and reads_store:
        return MemoryPart("fetched weights", STORE_COPIES * one, "the last version and the next")
    if config.executor == "ray":
        return MemoryPart("fetched weights", one, "the next version, while it is staged")
    return None


def _cut(config: RunConfig) -> str:
    """Description of how the weights are divided; empty where they are not."""
    mesh = config.parallel
    axes = {"fsdp": mesh.fsdp, "expert": mesh.expert, "tensor": mesh.tensor}
    cut = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
    return f", divided over {cut}" if cut else ""
