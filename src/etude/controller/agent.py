"""A trained model at work on a directory, in a sandbox; the directory itself is only read here."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.agent import AgentSession, LocalWorkspace, ToolContext, core_registry, run_session
from etude.controller.evaluate import load_policy
from etude.controller.parts import open_checked_backend, open_parts
from etude.environment.episodes import EpisodeLimits
from etude.errors import ConfigError
from etude.model import Qwen3Moe
from etude.observe import Observer, RunDirectory
from etude.records import PolicyVersion, SamplingParams, TrajectoryId
from etude.sandbox.template import Template
from etude.tokens.tokenizer import Tokenizer

_IGNORED = {".git", ".venv", "__pycache__", "node_modules"}
_MAX_BYTES = 8 << 20


def run_agent(run: RunDirectory, path: Path, instruction: str, observer: Observer) -> dict[str, Any]:
    """One greedy session on a copy of `path`.

    Returns `turns` (text and results of each), `status`, `diff` (unified) and `files` (path -> new text, or
    None where it was deleted). Raises ConfigError for a directory that is missing or too large.
    """
    files = _read_directory(path)
    tokenizer, model = load_policy(run, None)
    observer.say(f"{len(files)} files in the sandbox")
    return asyncio.run(_run(run, files, instruction, tokenizer, model))


async def _run(
    run: RunDirectory, files: Mapping[str, bytes], instruction: str, tokenizer: Tokenizer, model: Qwen3Moe
) -> dict[str, Any]:
    config = run.config
    limits = EpisodeLimits.from_config(config)
    backend = open_checked_backend(config.sandbox.backend)
    try:
        async with open_parts(config, tokenizer, deterministic=False) as parts:
            manifest = parts.weights.publish(PolicyVersion(config.name, 0), dict(model.named_parameters()))
            await parts.service.stage(manifest)
            await parts.service.activate(manifest.version)
            session = AgentSession(
                instruction,
                parts.renderer,
                TrajectoryId("agent", "directory", 0, 0, 0),
                limits.session,
                SamplingParams(temperature=0.0),
            )
            sandbox = await backend.create(Template(files), limits.sandbox)
            tests = tuple(sorted(name for name in files if _is_test(name)))
            context = ToolContext(sandbox, core_registry(), tests, limits.tools)
            await run_session(session, parts.service, LocalWorkspace(context), "agent", (config.seed,))
            changes = await sandbox.final_diff()
            await sandbox.kill()
    finally:
        await backend.close()
    return {
        "turns": [
            {"text": turn.text.removesuffix("<|end|>"), "results": [result.output for result in turn.results]}
            for turn in session.turns
        ],
        "status": session.status.value if session.status else "",
        "diff": _unified_diff(files, changes),
        "files": {
            name: data.decode("utf-8", "replace") if data is not None else None
            for name, data in changes.items()
        },
    }


def _read_directory(path: Path) -> dict[str, bytes]:
    if not path.is_dir():
        raise ConfigError("no such directory", field="path", received=str(path), fix="name a directory")
    files: dict[str, bytes] = {}
    total = 0
    for entry in sorted(path.rglob("*")):
        relative = entry.relative_to(path)
        if _IGNORED.intersection(relative.parts) or entry.is_symlink() or not entry.is_file():
            continue
        total += entry.stat().st_size
        if total > _MAX_BYTES:
            raise ConfigError(
                f"holds more than {_MAX_BYTES >> 20} MiB",
                field="path",
                received=str(path),
                fix="name a smaller one",
            )
        files[relative.as_posix()] = entry.read_bytes()
    return files


def _is_test(name: str) -> bool:
    file = name.rsplit("/", 1)[-1]
    return file.startswith("test_") and file.endswith(".py")


def _unified_diff(files: Mapping[str, bytes], changes: Mapping[str, bytes | None]) -> str:
    parts: list[str] = []
    for name, data in sorted(changes.items()):
        old = files.get(name, b"").decode("utf-8", "replace").splitlines(keepends=True)
        new = (data or b"").decode("utf-8", "replace").splitlines(keepends=True)
        parts += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(parts)
