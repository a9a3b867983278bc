"""`etude serve`: OpenAI's API over a checkpoint or a run's model."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from etude.cli.served_model import (
    EngineChoice,
    GrammarOption,
    OpenedModel,
    RunningEngine,
    ServedTemplate,
    open_checkpoint,
    running_engine,
)
from etude.cli.serving_options import (
    AdminTokenOption,
    AllowedHostOption,
    CacheDtypeOption,
    CertificateOption,
    DrainOption,
    HostOption,
    KernelsOption,
    KeyOption,
    LineageOption,
    PortOption,
    StepOption,
    WeightDtypeOption,
)
from etude.records import PolicyVersion

if TYPE_CHECKING:
    from etude.inference import EngineService
    from etude.inference.server import KeyLimits, Keys
    from etude.inference.server.loans import LoanDesk

_MIB = 1 << 20

ModelArgument = Annotated[Path, typer.Argument(help="Directory of a Hugging Face checkpoint or run.")]
NameOption = Annotated[
    str | None, typer.Option(help="Model name for clients. Default: the directory's name.")
]
TokensOption = Annotated[
    Path | None, typer.Option(help="File with a line NAME:TOKEN for each key. Default: no keys.")
]
TemplateOption = Annotated[ServedTemplate, typer.Option(help="Chat template.")]
ContextOption = Annotated[
    int | None, typer.Option(min=16, help="Limit of prompt and answer in tokens. Default: the model's.")
]
AnswerOption = Annotated[int, typer.Option(min=1, help="Default limit of an answer in tokens.")]
NumSessionsOption = Annotated[int, typer.Option(min=1, help="Answers computed at the same time.")]
CacheOption = Annotated[
    int, typer.Option(min=0, help="MiB for keys and values; 0: at most half of the free memory.")
]
SpeculativeOption = Annotated[
    int, typer.Option(min=0, help="Tokens drafted ahead and verified in one step; 0 turns it off.")
]
DraftsOption = Annotated[
    Literal["ngram", "mtp"], typer.Option(help="Source of drafts: the session itself, or prediction layers.")
]
PoolOption = Annotated[str, typer.Option(help="Pool of the router to which this replica belongs.")]
BodyOption = Annotated[int, typer.Option(min=1, help="Largest request body in bytes.")]
RequestsOption = Annotated[int, typer.Option(min=1, help="Most open requests, waiting ones included.")]
KeyRequestsOption = Annotated[int, typer.Option(min=0, help="Most open requests per key; 0: no limit.")]
KeyTokensOption = Annotated[int, typer.Option(min=0, help="Most tokens per minute per key; 0: no limit.")]
AnswerTimeOption = Annotated[float, typer.Option(min=1, help="Longest time of one answer in seconds.")]


def serve_command(
    model: ModelArgument,
    host: HostOption = "127.0.0.1",
    allowed_host: AllowedHostOption = None,
    port: PortOption = 8660,
    name: NameOption = None,
    tokens_file: TokensOption = None,
    admin_token_file: AdminTokenOption = None,
    grammar: GrammarOption = "auto",
    template: TemplateOption = "auto",
    lineage: LineageOption = None,
    step: StepOption = 0,
    max_context: ContextOption = None,
    max_answer: AnswerOption = 4096,
    num_sessions: NumSessionsOption = 64,
    cache_mib: CacheOption = 0,
    cache_dtype: CacheDtypeOption = "auto",
    weight_dtype: WeightDtypeOption = "auto",
    kernels: KernelsOption = "auto",
    speculative_tokens: SpeculativeOption = 0,
    drafts: DraftsOption = "ngram",
    pool: PoolOption = "serve",
    max_body: BodyOption = 32 * _MIB,
    max_requests: RequestsOption = 1024,
    key_requests: KeyRequestsOption = 256,
    key_tokens: KeyTokensOption = 0,
    answer_s: AnswerTimeOption = 900.0,
    drain_s: DrainOption = 60.0,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Serve a model with OpenAI's and Anthropic's APIs: chat, responses, completions and messages."""
    # Heavy: torch and FastAPI come with them.
    from etude.inference.server import KeyLimits, ServerLimits, ServerState, serve
    from etude.serving.listening import open_listeners

    engine = EngineChoice(
        num_sessions, cache_mib * _MIB, kernels, speculative_tokens, drafts, cache_dtype, weight_dtype
    )
    engine.choose_place()
    keys, admin_token = _access(host, tokens_file, admin_token_file, KeyLimits(key_requests, key_tokens))
    # Before loading the weights, which takes long, so that a port in use is reported at once.
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in open_listeners(host, port)]
        opened = open_checkpoint(model, name, (grammar, template), max_context, max_answer)
        version = PolicyVersion(lineage or opened.served.name, step)

        async def run() -> None:
            """Runs the engine and the server until a signal."""
            async with running_engine(opened, version, engine) as running:
                service = running.service
                # A replica without an administrator's token cannot be lent.
                desk = _desk(running, opened, engine) if admin_token else None
                state = ServerState(
                    opened.served,
                    service,
                    desk.home if desk is not None else service,
                    keys,
                    ServerLimits(max_body, max_requests, answer_s),
                    admin_token,
                    pool,
                    desk,
                    lambda: _gauges(service),
                    lambda: service.failure,
                )
                await serve(
                    state,
                    listeners=listeners,
                    drain_s=drain_s,
                    allowed_hosts=(host, *(allowed_host or ())),
                    certificate=certificate,
                    key=key,
                )

        asyncio.run(run())


def _access(host: str, tokens: Path | None, admin_token: Path | None, limits: KeyLimits) -> tuple[Keys, str]:
    """The API keys, and the administrator's token, which may be empty. Raises ConfigError."""
    from etude.inference.server import Keys, check_address, read_keys
    from etude.inference.server.app import SERVER
    from etude.sandbox.server import read_token

    check_address(host, has_keys=tokens is not None)
    keys = read_keys(tokens, limits) if tokens is not None else Keys({})
    return keys, read_token(admin_token, SERVER) if admin_token is not None else ""


def _desk(engine: RunningEngine, opened: OpenedModel, choice: EngineChoice) -> LoanDesk:
    """The LoanDesk that lends the engine to runs."""
    from etude.inference.exchange import Build
    from etude.inference.server.loans import LoanDesk

    about = {
        "build": asdict(Build.here(opened.weights.config)),
        "numerics": choice.numerics,
        "tokenizer": opened.served.tokenizer.digest,
        "max_context_tokens": opened.served.max_context_tokens,
    }
    return LoanDesk(engine.service, engine.manifest, about)


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
