"""Models for the commands that serve: loading from a directory, chat format, and a running engine."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from etude.config import GrammarName, TemplateName
from etude.errors import CheckpointError, ConfigError, ResourceError, UserError
from etude.records import PolicyVersion, WeightManifest

if TYPE_CHECKING:
    from etude.config import ModelConfig
    from etude.controller.compute import Place
    from etude.inference import EngineService
    from etude.inference.cache import CacheFormat
    from etude.inference.engine import Engine
    from etude.inference.server import ServedModel
    from etude.model import LanguageModel
    from etude.tokens.tokenizer import Tokenizer

PREFILL_TOKENS = 2048
_CACHE_SHARE = 0.5
_MIB = 1 << 20
_SETTING = re.compile(r'set engine\.(\w+)="?(\w+)"?')

GrammarOption = Annotated[GrammarName, typer.Option(help="Grammar of tool calls.")]
ServedTemplate = Literal[TemplateName, "none"]


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that was loaded from a directory, and its chat format."""

    weights: LanguageModel
    served: ServedModel
    directory: Path
    """Directory of the checkpoint."""


def open_checkpoint(
    directory: Path,
    name: str | None,
    speech: tuple[GrammarName, ServedTemplate],
    max_context: int | None,
    max_answer: int,
    context_option: str = "--max-context",
) -> OpenedModel:
    """Loads a checkpoint directory, or the last checkpoint of a run. `speech`: grammar and template.
    `context_option`: the command's option for `max_context`.

    Raises CheckpointError, RunDirectoryError, ConfigError.
    """
    from etude.controller.evaluate import load_own
    from etude.inference.server import ServedModel

    tokenizer, weights = load_own(directory, "MODEL")
    grammar, template = speech
    renderers = None
    if template != "none":
        from etude.tokens.chat_format import choose_format

        renderers = choose_format(tokenizer, template, grammar).renderers()
    longest = weights.config.max_positions - 1
    if max_context is not None and max_context > longest:
        raise UserError(
            "exceeds the model's longest sequence",
            field=context_option,
            received=max_context,
            fix=f"set it to {longest} or less",
        )
    ends = _end_tokens(directory, tokenizer)
    if renderers is not None:
        from etude.tokens.chat.messages import Opening

        ends |= renderers.find(Opening()).end_tokens
    if not ends:
        raise ConfigError(
            "the checkpoint does not say which token ends an answer",
            field="--template",
            received=template,
            fix="add eos_token_id to the checkpoint's generation_config.json",
        )
    served = ServedModel(
        name or directory.resolve().name,
        tokenizer,
        ends,
        max_context or longest,
        renderers,
        max_answer,
        int(time.time()),
    )
    return OpenedModel(weights, served, directory)


def _end_tokens(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer, from the files of a Hugging Face directory."""
    found: set[int] = set()
    for file in ("generation_config.json", "config.json"):
        try:
            document: dict[str, Any] = json.loads((directory / file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise CheckpointError(
                f"is not valid JSON: {error}", field=file, received=str(directory)
            ) from error
        value = document.get("eos_token_id") if isinstance(document, dict) else None
        listed = value if isinstance(value, list) else [value]
        found |= {token for token in listed if isinstance(token, int) and 0 <= token < tokenizer.vocab_size}
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Size, kernels and number formats of the engine."""

    num_sessions: int
    cache_bytes: int
    kernels: str
    speculative_tokens: int
    drafts: str = "ngram"
    cache_dtype: str = "auto"
    weight_dtype: str = "auto"

    def choose_place(self) -> Place:
        """Device, number format and kernels of the engine. Raises UserError for a number format that the
        kernels do not support, ResourceError for unavailable kernels."""
        from etude.controller.compute import choose_place, choose_weight_dtype
        from etude.inference.cache import cache_type

        try:
            place = choose_place(kernels=self.kernels)
            if place.device == "cuda":  # there is one number format for everything on the device
                place = choose_place(place.device, self.weight_dtype, place.kernels)
            choose_weight_dtype(self.weight_dtype, place)
            cache_type(self.cache_dtype, place.kernels, place.dtype)
        except ConfigError as error:
            raise _option_error(error) from error
        return place

    def make(self, opened: OpenedModel) -> Engine:
        """Creates the engine. Raises ResourceError if one context does not fit into memory, ConfigError if
        draft layers are missing, and as `choose_place`."""
        from etude.controller.compute import choose_weight_dtype
        from etude.inference import Engine, choose_drafts
        from etude.inference.cache import cache_type
        from etude.observe.machine import available_cores

        config, longest = opened.weights.config, opened.served.max_context_tokens + 1
        place = self.choose_place()
        cache_dtype = cache_type(self.cache_dtype, place.kernels, place.dtype)
        return Engine(
            config,
            opened.weights.vocab_size,
            self.num_sessions,
            longest,
            PREFILL_TOKENS,
            place.kernels,
            available_cores(),
            num_pages=self._num_pages(opened, longest, place, cache_dtype),
            drafts=choose_drafts(self.drafts, self.speculative_tokens, opened.directory),
            native_weights=choose_weight_dtype(self.weight_dtype, place),
            device=place.device,
            cache_dtype=cache_dtype,
        )

    @property
    def numerics(self) -> dict[str, str]:
        """The settings besides the weights that determine the bits of results, for runs that borrow it."""
        from etude.controller.borrowed_engine import engine_numerics

        return engine_numerics(self.choose_place(), self.weight_dtype, self.cache_dtype)

    def _num_pages(self, opened: OpenedModel, longest: int, place: Place, cache_dtype: CacheFormat) -> int:
        """Number of pages that fit into memory, at most those of all sessions at their longest."""
        from etude.controller.compute import free_memory_bytes
        from etude.inference import page_bytes, pages_for

        memory = self.cache_bytes or int(free_memory_bytes(opened.weights, place) * _CACHE_SHARE)
        one_page, least = page_bytes(opened.weights.config, cache_dtype), pages_for(longest) or 1
        if memory < least * one_page:
            needed_mib = -(-least * one_page // _MIB)
            raise ResourceError(
                f"keys and values of one context of {longest - 1} tokens do not fit into memory",
                field="--cache-mib" if self.cache_bytes else "memory",
                received=f"{memory / _MIB:.0f} MiB" + ("" if self.cache_bytes else ", half of what is free"),
                fix=f"give them {needed_mib} MiB or more, or serve a shorter context",
            )
        return min(memory // one_page, self.num_sessions * least)


def _option_error(error: ConfigError) -> UserError:
    """Rewrites the error of a configuration key for the command-line option that set it."""
    field = (error.field or "").removeprefix("engine.").replace("_", "-")
    fix = _SETTING.sub(lambda found: f"choose --{found[1].replace('_', '-')} {found[2]}", error.fix or "")
    return UserError(error.message, field=f"--{field}", received=error.received, fix=fix or None)


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine in service."""

    service: EngineService
    manifest: WeightManifest
    """Manifest of the weights in service at the start."""
    config: ModelConfig
    """Configuration of the model."""


@contextlib.asynccontextmanager
async def running_engine(
    opened: OpenedModel, version: PolicyVersion, choice: EngineChoice
) -> AsyncIterator[RunningEngine]:
    """Runs the model in an engine that steps in a thread and schedules requests as they arrive. It accepts
    new weights from `memory:` and `file:` URLs.

    Raises ConfigError and ResourceError.
    """
    from etude.inference import EngineService
    from etude.inference.server.checkpoints import CheckpointWeights
    from etude.weights import MemoryWeights

    memory = MemoryWeights(keep=1)
    weights = CheckpointWeights(opened.weights.config, memory)
    service = await EngineService(choice.make(opened), weights.fetch, None).__aenter__()
    try:
        manifest = memory.publish(version, dict(opened.weights.named_parameters()))
        await service.stage(manifest)
        await service.activate(manifest.version)
        yield RunningEngine(service, manifest, opened.weights.config)
    finally:
        with contextlib.suppress(Exception):  # a failed loop has already ended its requests
            await service.__aexit__()
