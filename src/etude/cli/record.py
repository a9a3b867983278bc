"""`etude record serve`: train any OpenAI- or Anthropic-style agent."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.following import following
from etude.cli.served_model import EngineChoice, GrammarOption, open_checkpoint, running_engine
from etude.cli.serving_options import (
    AllowedHostOption,
    CertificateOption,
    DrainOption,
    HostOption,
    KernelsOption,
    KeyOption,
    LineageOption,
    PortOption,
    StepOption,
)
from etude.config import TemplateName
from etude.errors import ConfigError
from etude.kit.locks import locked
from etude.records import PolicyVersion

record_app = typer.Typer(name="record", no_args_is_help=True)

ModelOption = Annotated[Path, typer.Option(help="Directory of a Hugging Face checkpoint or run.")]
StoreOption = Annotated[Path, typer.Option(help="Directory in which the trajectories are stored.")]
TemplateOption = Annotated[TemplateName, typer.Option(help="Chat template.")]
ContextOption = Annotated[
    int | None, typer.Option(min=64, help="Context limit in tokens. Default: the model's limit.")
]
AnswerOption = Annotated[int, typer.Option(min=1, help="Default limit of an answer in tokens.")]
SlotsOption = Annotated[int, typer.Option(min=1, help="Contexts whose keys and values are kept.")]
TokenFileOption = Annotated[
    Path | None, typer.Option(help="File with a line `TENANT TOKEN` for each tenant. Default: STORE/tokens.")
]
FollowOption = Annotated[
    Path | None,
    typer.Option(help="Run directory, or checkpoint, whose new weights are served as they are saved."),
]


@record_app.callback()
def record() -> None:
    """Serve a model to other agent harnesses and record every token of their sessions."""


def _lock_store(store: Path, stack: contextlib.ExitStack) -> None:
    """Locks the directory against other servers until `stack` is closed. Raises ConfigError if one has it."""
    try:
        stack.enter_context(locked(store, wait=False))
    except BlockingIOError:
        raise ConfigError(
            "another server already stores its sessions here",
            field="--store",
            received=str(store),
            fix="give this server its own directory, or stop the other one",
        ) from None


@record_app.command("serve")
def serve_command(
    model: ModelOption,
    store: StoreOption,
    grammar: GrammarOption = "auto",
    template: TemplateOption = "auto",
    lineage: LineageOption = None,
    step: StepOption = 0,
    max_tokens: ContextOption = None,
    max_answer_tokens: AnswerOption = 2048,
    num_slots: SlotsOption = 16,
    kernels: KernelsOption = "auto",
    host: HostOption = "127.0.0.1",
    allowed_host: AllowedHostOption = None,
    port: PortOption = 8650,
    token_file: TokenFileOption = None,
    follow: FollowOption = None,
    drain_s: DrainOption = 60.0,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Serve a model to any agent, and store its sessions as trajectories that can be trained on."""
    # Heavy: torch and FastAPI come with them.
    from etude.environment.recording import MapLimits, RecordingLimits, Recordings
    from etude.environment.recording.server import serve
    from etude.environment.recording.server.app import SERVER
    from etude.serving.listening import check_host, open_listeners
    from etude.serving.token_files import read_or_make_tenants

    in_the_clear = "keys would cross the network unencrypted"
    check_host(host, certificate is not None, in_the_clear, "give --certificate and --key")
    store.mkdir(parents=True, exist_ok=True)
    # Before loading the weights, which takes long, so that a store or port in use is reported at once.
    with contextlib.ExitStack() as stack:
        _lock_store(store, stack)
        tenants = read_or_make_tenants(token_file or store / "tokens", SERVER)
        listeners = [stack.enter_context(listener) for listener in open_listeners(host, port)]
        speech = (grammar, template)
        opened = open_checkpoint(model, None, speech, max_tokens, max_answer_tokens, "--max-tokens")
        limits = RecordingLimits(
            session=MapLimits(max_context_tokens=opened.served.max_context_tokens),
            default_max_tokens=max_answer_tokens,
        )
        version = PolicyVersion(lineage or opened.served.name, step)
        renderers = opened.served.renderers
        assert renderers is not None, "only the template `none` has no renderers, and it is refused"

        async def run() -> None:
            """Runs the engine and the server until a signal."""
            choice = EngineChoice(num_slots, 0, kernels, 0)
            async with running_engine(opened, version, choice) as engine:
                recordings = Recordings(engine.service, renderers, store, tenants, limits)
                async with following(engine, follow, engine.manifest.version, opened.directory):
                    await serve(
                        recordings,
                        note=f"it samples from {version} and stores trajectories in {store}",
                        listeners=listeners,
                        drain_s=drain_s,
                        allowed_hosts=(host, *(allowed_host or ())),
                        certificate=certificate,
                        key=key,
                    )

        asyncio.run(run())
