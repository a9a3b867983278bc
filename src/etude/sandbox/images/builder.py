"""Builds images from Dockerfiles, instruction by instruction, each made once.

COPY and WORKDIR make a layer directly, and are cached by what they copy. RUN goes to a `LayerRunner` (a
sandbox over the image so far), and is cached by that image, the command and its environment. Stages that
the wanted one does not need are not built. What differs from Docker stands in docs/images.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.errors import SandboxError
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.context import (
    find_stage,
    read_dockerfile,
    read_ignore,
    refuse_archives,
    refuse_remote,
)
from etude.sandbox.images.copying import LayerPlan
from etude.sandbox.images.dockerfile import IGNORED, Dockerfile, Instruction, Stage
from etude.sandbox.images.image_store import ImageStore, check_name
from etude.sandbox.images.runner import LayerRunner, RunResult
from etude.sandbox.images.sources import ContextSource, ImageSource, Source
from etude.sandbox.images.stage import (
    StageState,
    architecture,
    expand_in,
    finished,
    global_arguments,
    platform_arguments,
)
from etude.sandbox.images.streams import DigestWriter
from etude.sandbox.images.view import ImageView
from etude.sandbox.template import Image

RUN_TIMEOUT_S = 600.0
RUN_GRACE_S = 30.0
"""How much later than the command's own deadline the runner must have answered."""
OUTPUT_CHARS = 2000
_CACHE_VERSION = 1
_MODE = re.compile(r"0?[0-7]{3,4}\Z")


class BaseSource(Protocol):
    """Makes the images that FROM may name without anybody having built them."""

    def names(self) -> list[str]:
        """What it can make."""
        ...

    async def image(self, name: str) -> Image | None:
        """The image, made now if need be; None for a name it does not know."""
        ...


@dataclass(frozen=True, slots=True)
class Build:
    """What a build made."""

    image: Image
    notes: tuple[str, ...]
    """What was read and ignored, each with its line."""
    num_run: int
    """RUN instructions that were run."""
    num_cached: int
    """RUN instructions whose result was there already."""


class Builder:
    """Builds into a store. Several builds may run at once; equal steps are then made once.

    `on_step` is told each instruction before it is carried out.
    """

    def __init__(
        self,
        store: ImageStore,
        runner: LayerRunner,
        bases: BaseSource | None = None,
        run_timeout_s: float = RUN_TIMEOUT_S,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        self.store = store
        self.runner = runner
        self.bases = bases
        self.run_timeout_s = run_timeout_s
        self.on_step = on_step
        self._steps: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def build(
        self,
        context: Path,
        name: str,
        dockerfile: str = "Dockerfile",
        arguments: Mapping[str, str] | None = None,
        target: str | None = None,
        fresh: bool = False,
    ) -> Build:
        """Builds the Dockerfile of the directory `context` and keeps the image under `name`.

        `target` names a stage (default: the last), `arguments` values of ARGs; `fresh` runs every RUN again.
        Raises TemplateError with file, line and instruction for what does not parse or fails, SandboxError
        if the runner fails.
        """
        check_name(name)
        parsed = await asyncio.to_thread(read_dockerfile, context, dockerfile)
        ignore = await asyncio.to_thread(read_ignore, context, dockerfile)
        work = _Work(self, parsed, ContextSource(context, ignore), dict(arguments or {}), fresh)
        image = await work.build(find_stage(parsed, target), name)
        await asyncio.to_thread(self.store.save, image)
        return Build(image, tuple(work.notes), work.num_run, work.num_cached)

    async def base(self, name: str) -> Image:
        """What FROM `name` starts with. Raises TemplateError if there is no such image."""
        if name == "scratch":
            return Image("scratch", (), workdir="/")
        short = name.removeprefix("library/")
        for candidate in (short, *([] if ":" in short or "@" in short else [f"{short}:latest"])):
            if await asyncio.to_thread(self.store.has, candidate):
                return await asyncio.to_thread(self.store.load, candidate)
            image = await self.bases.image(candidate) if self.bases is not None else None
            if image is not None:
                return image
        known = sorted({*self.store.list(), *(self.bases.names() if self.bases is not None else ())})
        raise TemplateError(
            "no such base image", received=name,
            fix=f"known: {', '.join(known) or 'none'}; others: save them with another tool as an OCI archive "
            "and import that under the same name",
        )  # fmt: skip

    def lock(self, key: str) -> asyncio.Lock:
        """One lock for equal steps."""
        return self._steps.setdefault(key, asyncio.Lock())


@dataclass
class _Work:
    """One build."""

    builder: Builder
    dockerfile: Dockerfile
    context: ContextSource
    given: dict[str, str]
    fresh: bool
    notes: list[str] = field(default_factory=list)
    num_run: int = 0
    num_cached: int = 0
    _built: dict[int, StageState] = field(default_factory=dict)

    async def build(self, index: int, name: str) -> Image:
        self._check_arguments()
        state = await self._stage(index)
        if state.image.workdir == "/":
            self.notes.append("no WORKDIR: the workspace is /workspace")
        image = finished(state.image, name)
        plan = LayerPlan(await self._view(image))
        await asyncio.to_thread(plan.make_directory, image.workdir)
        final = StageState(image, self.dockerfile.escape)
        final.add_layer(await self._add(plan))
        return final.image

    def _check_arguments(self) -> None:
        declared = {
            word.partition("=")[0]
            for instruction in self._all_instructions()
            if instruction.keyword == "ARG"
            for word in instruction.text.split()
        }
        unknown = sorted(name for name in self.given if name not in declared or "\0" in self.given[name])
        if unknown:
            raise TemplateError(
                "no ARG of that name, or a NUL in its value", field=self.dockerfile.name, received=unknown[0],
                fix=f"declared: {', '.join(sorted(declared)) or 'none'}",
            )  # fmt: skip

    def _all_instructions(self) -> list[Instruction]:
        stages = (instruction for stage in self.dockerfile.stages for instruction in stage.instructions)
        return [*self.dockerfile.arguments, *stages]

    async def _stage(self, index: int) -> StageState:
        if index not in self._built:
            stage = self.dockerfile.stages[index]
            state = await self._start(stage, index)
            for instruction in stage.instructions:
                if self.builder.on_step is not None:
                    self.builder.on_step(f"{instruction.line}: {instruction.keyword} {instruction.text}")
                await self._carry_out(instruction, state, index)
            self._built[index] = state
        return self._built[index]

    async def _start(self, stage: Stage, index: int) -> StageState:
        escape = self.dockerfile.escape
        arguments = global_arguments(self.dockerfile.arguments, self.given, escape)
        name = expand_in(stage.start, stage.base, arguments, escape)
        wanted = expand_in(stage.start, stage.start.flag("platform") or "", arguments, escape)
        if wanted and wanted != f"linux/{architecture()}":
            raise stage.start.error("images of another platform cannot be built here", wanted)
        return StageState(await self._image(stage.start, name, index), escape)

    async def _image(self, instruction: Instruction, name: str, index: int) -> Image:
        """The image of an earlier stage, or a base image."""
        for earlier, stage in enumerate(self.dockerfile.stages[:index]):
            if stage.name == name.lower() or (instruction.keyword == "COPY" and name == str(earlier)):
                return (await self._stage(earlier)).image
        try:
            return await self.builder.base(name)
        except TemplateError as error:
            raise instruction.error(error.message, error.received, error.fix) from error

    async def _carry_out(self, instruction: Instruction, state: StageState, index: int) -> None:
        keyword = instruction.keyword
        if keyword == "RUN":
            await self._run(instruction, state)
        elif keyword in ("COPY", "ADD"):
            await self._copy(instruction, state, index)
        elif keyword == "WORKDIR":
            state.set_workdir(instruction)
            plan = LayerPlan(await self._view(state.image))
            await self._plan(instruction, lambda: plan.make_directory(state.image.workdir))
            state.add_layer(await self._add(plan))
        elif keyword == "ENV":
            state.set_env(instruction)
        elif keyword == "ARG":
            known = global_arguments(self.dockerfile.arguments, self.given, state.escape)
            state.declare(instruction, {**platform_arguments(), **known, **self.given})
        elif keyword == "USER":
            state.set_user(instruction)
        elif keyword == "SHELL":
            state.shell = instruction.words or state.shell
        elif IGNORED[keyword]:
            self._note(instruction, f"ignored: {IGNORED[keyword]}")

    async def _run(self, instruction: Instruction, state: StageState) -> None:
        argv = instruction.words or (*state.shell, instruction.text)
        if instruction.flag("mount") is not None:
            self._note(instruction, "caches are not kept: --mount=type=cache is ignored")
        image, env = state.image, state.run_env
        key = _key(image.digest, argv, sorted(env.items()), image.workdir, image.user)
        async with self.builder.lock(key):
            found = None if self.fresh else await asyncio.to_thread(self._recall, key)
            if found is None:
                layer = await self._run_now(instruction, image, argv, env)
                await asyncio.to_thread(self.builder.store.note, key, {"layer": layer})
                self.num_run += 1
            else:
                layer = found["layer"]
                self.num_cached += 1
        state.add_layer(layer)

    def _recall(self, key: str) -> dict[str, str | None] | None:
        record = self.builder.store.recall(key)
        if record is None or "layer" not in record:
            return None
        layer = record["layer"]
        return record if layer is None or self.builder.store.layers.has(str(layer)) else None

    async def _run_now(
        self, instruction: Instruction, image: Image, argv: tuple[str, ...], env: Mapping[str, str]
    ) -> str | None:
        timeout_s = self.builder.run_timeout_s
        try:
            async with asyncio.timeout(timeout_s + RUN_GRACE_S):
                result = await self.builder.runner.run(image, argv, env, image.workdir, image.user, timeout_s)
        except TimeoutError as error:
            raise SandboxError(
                "the runner of a build does not answer", field="builder", received=instruction.text[:200]
            ) from error
        try:
            if result.timed_out or result.exit_code != 0:
                raise _failure(instruction, result, timeout_s)
            if result.layer_tar is None:
                return None
            return await asyncio.to_thread(self._import_layer, result.layer_tar)
        finally:
            if result.layer_tar is not None:
                with contextlib.suppress(FileNotFoundError):
                    result.layer_tar.unlink()

    def _import_layer(self, path: Path) -> str:
        with path.open("rb") as file:
            return self.builder.store.layers.add_tar(file, name="changes of RUN")

    async def _copy(self, instruction: Instruction, state: StageState, index: int) -> None:
        *patterns, target = state.words(instruction) or [""]
        if not patterns or not target:
            raise instruction.error("needs a source and a target", instruction.text[:80])
        if instruction.flag("chown") is not None:
            self._note(instruction, "--chown is ignored: all files belong to the sandbox's one user")
        source = await self._source(instruction, state, index)
        mode = _mode(instruction, state)
        plan = LayerPlan(await self._view(state.image))

        def select() -> None:
            if instruction.keyword == "ADD":
                refuse_remote(patterns)
            selected = [found for pattern in patterns for found in source.select(pattern)]
            if instruction.keyword == "ADD":
                refuse_archives(selected)
            plan.copy(selected, state.absolute(target), mode)

        await self._plan(instruction, select)
        state.add_layer(await self._add(plan, instruction))

    async def _source(self, instruction: Instruction, state: StageState, index: int) -> Source:
        name = instruction.flag("from")
        if name is None:
            return self.context
        image = await self._image(instruction, state.expand(instruction, name), index)
        return ImageSource(await self._view(image))

    async def _plan(self, instruction: Instruction, make: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(make)
        except TemplateError as error:
            raise instruction.error(error.message, error.received, error.fix) from error
        except OSError as error:
            raise instruction.error(f"cannot be read: {error}") from error

    async def _add(self, plan: LayerPlan, instruction: Instruction | None = None) -> str | None:
        """Makes the planned layer, unless it is there already."""
        if plan.is_empty:
            return None
        try:
            return await asyncio.to_thread(self._add_now, plan)
        except TemplateError as error:
            if instruction is None:
                raise
            raise instruction.error(error.message, error.received, error.fix) from error

    def _add_now(self, plan: LayerPlan) -> str:
        layers = self.builder.store.layers
        with layers.scratch() as folder:
            path = folder / "copied.tar"
            with path.open("wb") as file:
                digested = DigestWriter(file.write)
                plan.write(digested)
            if layers.has(digested.digest):
                return digested.digest
            with path.open("rb") as file:
                return layers.add_tar(file, digested.digest, name="copied files")

    async def _view(self, image: Image) -> ImageView:
        return await asyncio.to_thread(self.builder.store.view, image)

    def _note(self, instruction: Instruction, text: str) -> None:
        self.notes.append(f"{instruction.source}, line {instruction.line}: {instruction.keyword}: {text}")


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps([_CACHE_VERSION, *parts]).encode()).hexdigest()


def _mode(instruction: Instruction, state: StageState) -> int | None:
    text = instruction.flag("chmod")
    if text is None:
        return None
    text = state.expand(instruction, text)
    if not _MODE.match(text):
        raise instruction.error("modes are octal numbers here", text[:40], "for example --chmod=755")
    return int(text, 8)


def _failure(instruction: Instruction, result: RunResult, timeout_s: float) -> TemplateError:
    how = (
        f"ran longer than {timeout_s:g} s" if result.timed_out else f"ended with exit code {result.exit_code}"
    )
    tail = result.output[-OUTPUT_CHARS:].strip()
    return instruction.error(
        f"the command {how}; its output ends with: {tail or '(nothing)'}",
        instruction.text[:500],
        "mend the command; what it needs must be in the base image, or reachable for the builder's sandbox",
    )
