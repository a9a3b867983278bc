"""`etude record serve`: train any OpenAI- or Anthropic-style agent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.errors import ConfigError, UserError
from etude.records import PolicyVersion

if TYPE_CHECKING:
    from etude.environment.recording import RecordingLimits, RendererShelf
    from etude.model import Qwen3Moe
    from etude.tokens.tokenizer import Tokenizer

record_app = typer.Typer(
    name="record",
    help="A recording endpoint: other harnesses play, Étude keeps every token.",
    no_args_is_help=True,
)


@record_app.callback()
def record() -> None:
    """A recording endpoint: other harnesses play, Étude keeps every token."""


@record_app.command("serve")
def serve_command(
    model: Annotated[Path, typer.Option(help="Directory with config.json, weights and tokenizer.json.")],
    store: Annotated[Path, typer.Option(help="Directory for the trajectories.")],
    grammar: Annotated[str, typer.Option(help="auto, hermes or xml: how the model writes calls.")] = "auto",
    template: Annotated[
        str, typer.Option(help="auto, qwen3, chatml or etude: how messages are framed.")
    ] = "auto",
    lineage: Annotated[
        str | None, typer.Option(help="Name of the weights' line; else the directory's.")
    ] = None,
    step: Annotated[int, typer.Option(min=0, help="Optimiser steps that the weights have had.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=64, help="Of one context, answers included; else what the model can.")
    ] = None,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="Where an agent names no number.")] = 2048,
    num_slots: Annotated[int, typer.Option(min=1, help="Contexts whose keys and values are held.")] = 16,
    kernels: Annotated[str, typer.Option(help="auto, eager or native.")] = "auto",
    host: Annotated[
        str, typer.Option(help="Address to bind to; others than loopback need TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free.")] = 8650,
    token_file: Annotated[
        Path | None, typer.Option(help="Lines of `tenant token`; else, and made if missing, STORE/tokens.")
    ] = None,
    drain_s: Annotated[float, typer.Option(min=0, help="How long sessions may go on after SIGTERM.")] = 60.0,
    certificate: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
) -> None:
    """Serve a model to agents that know nothing of Étude, and store their sessions as trajectories."""
    if kernels not in ("auto", "eager", "native"):
        raise UserError("no such kernels", field="--kernels", received=kernels, fix="auto, eager or native")
    # Heavy: torch and FastAPI come with them.
    from etude.environment.recording import MapLimits, RecordingLimits
    from etude.environment.recording.server import read_tokens
    from etude.environment.recording.server.process import check_address
    from etude.model.huggingface import load_model
    from etude.sandbox.server.process import open_listeners
    from etude.tokens.tokenizer import Tokenizer

    check_address(host, certificate)
    tokenizer = Tokenizer.load(model)
    shelf = make_shelf(tokenizer, grammar, template)
    store.mkdir(parents=True, exist_ok=True)
    tenants = read_tokens(token_file or store / "tokens")
    # Before the weights, which take long: a port that is taken is said at once.
    listeners = open_listeners(host, port)
    loaded = load_model(model)
    longest = loaded.config.max_positions - 1
    if max_tokens is not None and max_tokens > longest:
        raise UserError(
            "the model's positions end before", field="--max-tokens", received=max_tokens, fix=f"{longest}"
        )
    limits = RecordingLimits(
        session=MapLimits(max_context_tokens=max_tokens or longest), default_max_tokens=max_answer_tokens
    )
    version = PolicyVersion(lineage or model.resolve().name, step)
    note = f"it samples from {version} and stores trajectories in {store}"
    asyncio.run(
        _serve(
            loaded,
            shelf,
            version,
            store,
            tenants,
            limits,
            (num_slots, kernels),
            {
                "host": host,
                "listeners": listeners,
                "note": note,
                "drain_s": drain_s,
                "certificate": certificate,
                "key": key,
            },
        )
    )


def make_shelf(tokenizer: Tokenizer, grammar: str, template: str) -> RendererShelf:
    """How the model is talked to; `auto` goes by the control tokens that its tokenizer holds.

    Raises UserError for a name that there is not.
    """
    from etude.tokens.chat.shelf import RendererShelf
    from etude.tokens.grammar import HermesGrammar, XmlGrammar
    from etude.tokens.template import TEMPLATES

    hermes = tokenizer.has_control("<tool_call>") or tokenizer.has_control("<|im_start|>")
    if template == "auto":
        chat = "qwen3" if tokenizer.has_control("<tool_response>") else "chatml"
        template = chat if tokenizer.has_control("<|im_start|>") else "etude"
    if grammar == "auto":
        grammar = "hermes" if hermes else "xml"
    grammars = {"hermes": HermesGrammar, "xml": XmlGrammar}
    if grammar not in grammars:
        raise UserError("no such grammar", field="--grammar", received=grammar, fix="auto, hermes or xml")
    if template not in TEMPLATES:
        names = ", ".join(TEMPLATES)
        raise UserError("no such template", field="--template", received=template, fix=f"auto, {names}")
    for name in TEMPLATES[template].control_tokens:
        if not tokenizer.has_control(name):
            raise ConfigError(
                "the tokenizer lacks a control token of the template",
                field="--template",
                received=name,
                fix="name the template that the model was trained with",
            )
    return RendererShelf(tokenizer, grammars[grammar], TEMPLATES[template])


async def _serve(
    model: Qwen3Moe,
    shelf: RendererShelf,
    version: PolicyVersion,
    store: Path,
    tenants: dict[str, str],
    limits: RecordingLimits,
    engine_options: tuple[int, str],
    serving: dict[str, object],
) -> None:
    """An engine that takes requests as they come, and the server before it."""
    from etude.controller.compute import choose_kernels
    from etude.environment.recording import Recordings
    from etude.environment.recording.server import serve
    from etude.inference import Engine, EngineService
    from etude.observe.machine import available_cores
    from etude.weights import MemoryWeights

    num_slots, kernels = engine_options
    engine = Engine(
        model.config,
        shelf.tokenizer.vocab_size,
        num_slots,
        limits.session.max_context_tokens + 1,
        kernels=choose_kernels(kernels),  # type: ignore[arg-type]
        native_threads=available_cores(),
    )
    weights = MemoryWeights()
    async with EngineService(engine, weights.fetch, delay_steps=None) as service:
        manifest = weights.publish(version, dict(model.named_parameters()))
        await service.stage(manifest)
        await service.activate(manifest.version)
        recordings = Recordings(service, shelf, store, tenants, limits)
        await serve(recordings, **serving)  # type: ignore[arg-type]
