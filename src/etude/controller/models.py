"""The initial model of a run: resolves the configuration by its checkpoint, and checks that they fit."""

from __future__ import annotations

from pathlib import Path

import torch

from etude.agent import open_renderer
from etude.config import SEARCHING, RunConfig
from etude.errors import ConfigError
from etude.model.huggingface import outline_model, read_fields
from etude.model.loading import (
    AnyModel,
    load_any_model,
    read_architecture,
    read_vocab_size,
    read_window,
)
from etude.model.transformers_model import TransformersModel
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer


def resolve_model(config: RunConfig, *, samples: bool = True) -> RunConfig:
    """The configuration with the section `model` taken from `initial_checkpoint`'s config.json, if there is
    one. Of a foreign architecture only `max_positions` is known.

    `samples`: whether sessions may be sampled; next-token training needs neither engine nor agent.

    Raises ConfigError where the rest of the configuration does not fit the model, CheckpointError.
    """
    if config.initial_checkpoint is None:
        return config
    directory = Path(config.initial_checkpoint)
    if not directory.is_dir():
        run = directory.parent.parent.name if directory.parent.name == "checkpoints" else ""
        raise ConfigError(
            "no such directory",
            field="initial_checkpoint",
            received=config.initial_checkpoint,
            fix=f"train the run {run!r} to its end first, or name another model" if run else "name a model",
        )
    missing = [name for name in ("config.json", TOKENIZER_FILE) if not (directory / name).exists()]
    if missing:
        raise ConfigError(
            f"has no {missing[0]}",
            field="initial_checkpoint",
            received=config.initial_checkpoint,
            fix="name a checkpoint with its tokenizer, such as runs/NAME/checkpoints/midtrained",
        )
    window = read_window(directory)
    if samples and config.agent.max_tokens > window:
        raise ConfigError(
            f"the model of initial_checkpoint has a window of {window} tokens",
            field="agent.max_tokens",
            received=config.agent.max_tokens,
            fix="set it lower, or start from another checkpoint",
        )
    own = read_architecture(directory)
    if own is None:
        if samples and not config.rl.stream.source:
            _check_sampled(config, directory)
        own = config.model.model_copy(update={"max_positions": window})
    return config.model_copy(update={"model": own})


def open_model(config: RunConfig, directory: Path) -> AnyModel:
    """Loads a model to train, in the number format of a resolved configuration. With several ranks, a model
    that is defined here gets no storage: each rank reads its own shards. Raises CheckpointError."""
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    if config.parallel.ranks == 1 or read_architecture(directory) is None:
        return load_any_model(directory, dtype)
    model = outline_model(read_fields(directory / "config.json"), dtype)
    model.unread = directory.resolve()
    return model


def check_format(config: RunConfig) -> None:
    """Raises ConfigError, before a run directory is made, if the chat format does not fit `[agent]`."""
    agent = config.agent
    if config.initial_checkpoint is None:
        frame = (("template", agent.template, "etude"), ("grammar", agent.grammar, "xml"))
        tools = (
            ("tools", agent.tools, "core"),
            ("system", agent.system, "no system words"),
            ("index", agent.index if agent.index in SEARCHING else "auto", "no semantic_search"),
            ("mcp", ", ".join(agent.mcp) or "auto", "no tools of servers"),
        )
        # A user's family may teach any tools: the tokenizer has the tags of those that are offered.
        for field, received, taught in (*frame, *(tools if config.tasks.has_shipped_family else ())):
            if received not in ("auto", taught):
                raise ConfigError(
                    f"mid-training teaches only {taught!r}",
                    field=f"agent.{field}",
                    received=received,
                    fix="leave it out, start from another model (initial_checkpoint), or teach it with a "
                    "task family of your own",
                )
        return
    directory = Path(config.initial_checkpoint)
    tokenizer = Tokenizer.load(directory)
    num_rows = read_vocab_size(directory) if read_architecture(directory) is not None else None
    if num_rows is not None and tokenizer.vocab_size > num_rows:
        raise ConfigError(
            f"its tokenizer has {tokenizer.vocab_size} tokens, and its embedding {num_rows} rows",
            field="initial_checkpoint",
            received=config.initial_checkpoint,
            fix="use the model's own tokenizer",
        )
    renderer = open_renderer(tokenizer, agent)
    used = len(renderer.prompt(""))
    if not config.rl.stream.source and used + agent.max_message_tokens >= agent.max_tokens:
        raise ConfigError(
            f"leaves no room for a task: the system message with its tools has {used} tokens, and a message "
            f"may have {agent.max_message_tokens}",
            field="agent.max_tokens",
            received=agent.max_tokens,
            fix='allow more, or offer fewer tools with agent.tools, such as "core"',
        )


def check_routing(config: RunConfig, model: AnyModel) -> None:
    """Raises ConfigError, before anything is sampled, for settings that the routers do not support."""
    rl = config.rl
    replays = rl.router_replay != "off"
    if isinstance(model, TransformersModel) and model.has_unknown_routers:
        for is_wanted, field, received, fix in (
            (replays, "rl.router_replay", rl.router_replay, 'set it to "off"'),
            (rl.loss.balance_weight > 0, "rl.loss.balance_weight", rl.loss.balance_weight, "set it to 0"),
        ):
            if is_wanted:
                raise ConfigError(
                    f"the routers of {type(model.inner).__name__} can be neither replayed nor measured",
                    field=field,
                    received=received,
                    fix=fix,
                )
    samples = not rl.stream.source and config.engine.backend == "vllm"
    if samples and rl.router_replay == "r3" and model.num_experts and not config.engine.vllm.record_routes:
        raise ConfigError(
            "replays the experts that the engine records, but vLLM is configured to record none",
            field="rl.router_replay",
            received=rl.router_replay,
            fix='set engine.vllm.record_routes = true, or rl.router_replay to "r2" or "off"',
        )


def _check_sampled(config: RunConfig, directory: Path) -> None:
    """Raises ConfigError unless vLLM samples a foreign architecture, and no other clusters do."""
    for is_wrong, field, received, fix in (
        (
            config.engine.backend != "vllm",
            "engine.backend",
            config.engine.backend,
            'set it to "vllm": such models train through transformers and sample through vLLM',
        ),
        (config.clusters.listen, "clusters.listen", config.clusters.listen, "leave it out"),
    ):
        if is_wrong:
            raise ConfigError(
                f"needs an architecture that Étude implements, unlike that of {directory.name}",
                field=field,
                received=received,
                fix=fix,
            )
