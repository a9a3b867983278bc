"""`etude serve`: OpenAI's API over a checkpoint or a run's model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli.record import make_shelf
from etude.errors import CheckpointError, ConfigError, UserError
from etude.records import PolicyVersion

if TYPE_CHECKING:
    from etude.inference import EngineService
    from etude.inference.engine import Engine
    from etude.inference.server import EngineView, Keys, ServedModel, ServerLimits
    from etude.inference.server.engine_thread import EngineThread
    from etude.model import LanguageModel
    from etude.tokens.tokenizer import Tokenizer

_PREFILL_TOKENS = 2048
_CACHE_SHARE = 0.5
_ELEMENT_BYTES = 4
_MIB = 1 << 20


def serve_command(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory (Hugging Face files), or a run.")],
    host: Annotated[
        str, typer.Option(help="Address to bind to; others than loopback need keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8660,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients; else its directory's.")
    ] = None,
    tokens_file: Annotated[
        Path | None, typer.Option(help="Lines of NAME:TOKEN; without it everyone on this machine is let in.")
    ] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(help="File with the token for /admin; made if there is none.")
    ] = None,
    grammar: Annotated[str, typer.Option(help="auto, hermes or xml: how the model writes calls.")] = "auto",
    template: Annotated[
        str, typer.Option(help="auto, qwen3, chatml, etude, or none: completions alone.")
    ] = "auto",
    lineage: Annotated[str | None, typer.Option(help="Name of the weights' line; else the model's.")] = None,
    step: Annotated[int, typer.Option(min=0, help="Optimiser steps that the weights have had.")] = 0,
    max_context: Annotated[
        int | None, typer.Option(min=16, help="Tokens of prompt and answer; else what the model can.")
    ] = None,
    max_answer: Annotated[int, typer.Option(min=1, help="Tokens where a chat names no number.")] = 4096,
    num_sessions: Annotated[int, typer.Option(min=1, help="Answers that are computed at once.")] = 64,
    cache_mib: Annotated[
        int, typer.Option(min=0, help="Memory for keys and values; 0: half of what is free, at most.")
    ] = 0,
    kernels: Annotated[str, typer.Option(help="auto, eager or native.")] = "auto",
    speculative_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens guessed ahead from the session's own; 0: none.")
    ] = 0,
    pool: Annotated[str, typer.Option(help="The pool of a router that this replica is in.")] = "serve",
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = 32 * _MIB,
    max_requests: Annotated[int, typer.Option(min=1, help="Answers at once, waiting ones included.")] = 1024,
    key_requests: Annotated[int, typer.Option(min=0, help="Answers at once of one key; 0: no limit.")] = 256,
    key_tokens: Annotated[int, typer.Option(min=0, help="Tokens a minute of one key; 0: no limit.")] = 0,
    idle_s: Annotated[float, typer.Option(min=1, help="Conversations end after it, unused.")] = 600.0,
    answer_s: Annotated[float, typer.Option(min=1, help="Longest time of one answer.")] = 900.0,
    drain_s: Annotated[float, typer.Option(min=0, help="How long answers may go on after SIGTERM.")] = 60.0,
    certificate: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
) -> None:
    """Serve a model by OpenAI's API: chat completions, completions, models, tokenisation."""
    for option, value, known in (
        ("--kernels", kernels, ("auto", "eager", "native")),
        ("--grammar", grammar, ("auto", "hermes", "xml")),
    ):
        if value not in known:
            raise UserError("no such choice", field=option, received=value, fix=", ".join(known))
    # Heavy: torch and FastAPI come with them.
    from etude.inference.server import KeyLimits, Keys, ServerLimits, check_address, read_keys
    from etude.inference.server.process import SERVER
    from etude.sandbox.server import read_token
    from etude.sandbox.server.process import open_listeners

    check_address(host, has_keys=tokens_file is not None)
    limits = KeyLimits(key_requests, key_tokens)
    keys = read_keys(tokens_file, limits) if tokens_file is not None else Keys({})
    admin_token = read_token(admin_token_file, SERVER) if admin_token_file is not None else ""
    speech, size = (
        (grammar, template),
        _EngineChoice(num_sessions, cache_mib * _MIB, kernels, speculative_tokens),
    )
    # Before the weights, which take long: a port that is taken is said at once.
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in open_listeners(host, port)]
        opened = open_checkpoint(model, name, speech, max_context, max_answer)
        serving = _Serving(
            opened,
            PolicyVersion(lineage or opened.served.name, step),
            size,
            keys,
            ServerLimits(max_body, max_requests, answer_s, idle_s),
            admin_token,
            pool,
            _Listening(listeners, drain_s, certificate, key),
        )
        asyncio.run(serving.run())


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model read from its directory, and how it is spoken to."""

    weights: LanguageModel
    served: ServedModel


def open_checkpoint(
    directory: Path, name: str | None, speech: tuple[str, str], max_context: int | None, max_answer: int
) -> OpenedModel:
    """Reads a checkpoint directory, or the last checkpoint of a run. `speech`: grammar and template.

    Raises CheckpointError, RunDirectoryError, ConfigError.
    """
    from etude.inference.server import ServedModel

    tokenizer, weights, checkpoint = _read(directory)
    grammar, template = speech
    shelf = None if template == "none" else make_shelf(tokenizer, grammar, template)
    longest = weights.config.max_positions - 1
    if max_context is not None and max_context > longest:
        raise UserError(
            "the model's positions end before", field="--max-context", received=max_context, fix=f"{longest}"
        )
    ends = _end_tokens(checkpoint, tokenizer)
    if shelf is not None:
        from etude.tokens.chat.messages import Opening

        ends |= {shelf.find(Opening()).end_token}
    if not ends:
        raise ConfigError(
            "nothing says which token ends an answer",
            field="--template",
            received=template,
            fix="add eos_token_id to the checkpoint's generation_config.json",
        )
    served = ServedModel(
        name or directory.resolve().name,
        tokenizer,
        ends,
        max_context or longest,
        shelf,
        max_answer,
        int(time.time()),
    )
    return OpenedModel(weights, served)


def _read(directory: Path) -> tuple[Tokenizer, LanguageModel, Path]:
    from etude.model.huggingface import load_model
    from etude.observe import RunDirectory
    from etude.tokens.tokenizer import Tokenizer

    if (directory / "config.json").is_file():
        tokenizer, weights = Tokenizer.load(directory), load_model(directory)
    elif (directory / "config.toml").is_file():
        from etude.controller.evaluate import load_policy

        tokenizer, weights = load_policy(RunDirectory.open(directory), None)
    else:
        raise CheckpointError(
            "no model here: neither config.json nor a run's config.toml",
            field="MODEL",
            received=str(directory),
            fix="name a Hugging Face checkpoint directory, or a run directory",
        )
    return tokenizer, weights, directory


def _end_tokens(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """What a Hugging Face directory says of the tokens that end an answer."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        try:
            document: dict[str, Any] = json.loads((directory / file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise CheckpointError(f"is no JSON: {error}", field=file, received=str(directory)) from error
        value = document.get("eos_token_id") if isinstance(document, dict) else None
        listed = value if isinstance(value, list) else [value]
        found |= {one for one in listed if isinstance(one, int) and 0 <= one < tokenizer.vocab_size}
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class _EngineChoice:
    """How large the engine is made."""

    num_sessions: int
    cache_bytes: int
    kernels: str
    speculative_tokens: int

    def make(self, opened: OpenedModel) -> Engine:
        """Raises ConfigError where too little memory is left for one context, ResourceError for kernels."""
        from etude.controller.compute import choose_kernels
        from etude.inference import Engine, NgramLookup, pages_for
        from etude.observe.machine import available_cores

        config, longest = opened.weights.config, opened.served.max_context_tokens + 1
        return Engine(
            config,
            opened.served.tokenizer.vocab_size,
            self.num_sessions,
            longest,
            _PREFILL_TOKENS,
            choose_kernels(self.kernels, model=config),  # type: ignore[arg-type]
            available_cores(),
            num_pages=pages_for(self._cache_tokens(opened, longest)),
            token_bytes=opened.served.tokenizer.decode_bytes,
            drafts=NgramLookup(self.speculative_tokens) if self.speculative_tokens else None,
        )

    def _cache_tokens(self, opened: OpenedModel, longest: int) -> int:
        from etude.observe.machine import available_memory_bytes

        config = opened.weights.config
        dims = config.key_dim + (0 if config.value_is_key_prefix else config.value_dim)
        token_bytes = config.num_layers * config.cache_heads * dims * _ELEMENT_BYTES
        memory = self.cache_bytes or int(available_memory_bytes() * _CACHE_SHARE)
        return min(memory // token_bytes, self.num_sessions * longest)


@dataclass(frozen=True, slots=True)
class _Listening:
    """Where and how the server listens."""

    listeners: Sequence[socket.socket]
    drain_s: float
    certificate: Path | None
    key: Path | None


@dataclass(frozen=True, slots=True)
class _Serving:
    """All that was chosen on the command line."""

    opened: OpenedModel
    version: PolicyVersion
    engine: _EngineChoice
    keys: Keys
    limits: ServerLimits
    admin_token: str
    pool: str
    listening: _Listening

    async def run(self) -> None:
        """An engine that takes requests as they come, and the server before it, until a signal."""
        from etude.inference import EngineService
        from etude.inference.server import ServerState, serve
        from etude.inference.server.checkpoints import CheckpointWeights
        from etude.inference.server.engine_thread import EngineThread
        from etude.weights import MemoryWeights

        opened, memory = self.opened, MemoryWeights(keep=1)
        weights = CheckpointWeights(opened.weights.config, memory)
        engine = EngineService(self.engine.make(opened), weights.fetch, None)
        async with EngineThread(engine) as service:
            manifest = memory.publish(self.version, dict(opened.weights.named_parameters()))
            await service.stage(manifest)
            await service.activate(manifest.version)
            state = ServerState(
                opened.served,
                service,
                service,
                self.keys,
                self.limits,
                self.admin_token,
                self.pool,
                _view(service),
            )
            at = self.listening
            await serve(state, at.listeners, drain_s=at.drain_s, certificate=at.certificate, key=at.key)


def _view(engine: EngineThread) -> EngineView:
    """What the engine tells `/metrics` and `/health`."""
    from etude.inference.server import EngineView

    async def gauges() -> Mapping[str, float]:
        return await engine.ask(_gauges)

    return EngineView(gauges, lambda: engine.failure)


def _gauges(service: EngineService) -> dict[str, float]:
    counters, load = service.engine.counters, service.load
    return {
        "etude_engine_prefill_tokens": counters.prefill_tokens,
        "etude_engine_cached_tokens": counters.cached_tokens,
        "etude_engine_decode_tokens": counters.decode_tokens,
        "etude_engine_steps": counters.steps,
        "etude_engine_preemptions": counters.preemptions,
        "etude_engine_running": load.running,
        "etude_engine_waiting": load.waiting,
        "etude_engine_free_pages": load.free_pages,
        "etude_engine_pages": load.num_pages,
        "etude_engine_longest_swap_seconds": service.times.longest_swap_s,
    }
