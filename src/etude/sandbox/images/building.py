"""Builds images from Dockerfiles by `buildah`; RUN has no rights on the host and no access to its network.

FROM resolves to a configured file (`bases`), else to the store, else to Debian packages. The build is
started; if buildah reports a missing base image, that is supplied and the build is started again. buildah
caches the layer of each instruction, so that equal beginnings are built once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from etude.kit.durable import read_record, write_json
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import BaseFile, find_in_store, full_name
from etude.sandbox.images.buildah import Buildah, OnLine, open_buildah
from etude.sandbox.images.built import (
    BuildInputs,
    BuildOptions,
    LastCopy,
    find_build,
    find_fingerprint,
    record_build,
)
from etude.sandbox.images.image_store import ImageStore, check_name
from etude.sandbox.images.oci import architecture, export_image, import_image
from etude.sandbox.network.log import RequestLog
from etude.sandbox.network.proxy import EgressProxy
from etude.sandbox.template import Image

BUILDAH = "buildah"
"""The directory of a store with buildah's storage."""
_TAIL_CHARS = 2000
_BUD = (
    "bud",
    "--layers",
    "--isolation=chroot",
    "--format=docker",
    "--pull-never",
    "--cap-drop=CAP_SYS_CHROOT",
)
"""CAP_SYS_CHROOT is dropped, as a process with it can leave a `chroot`."""
_LIMITS = "nofile=1024:4096"
"""buildah's own default exceeds the limit of some machines."""
_LACKS = re.compile(
    r"creating build container: (?P<base>\S+): image not known"
    r"|COPY --from=(?P<source>\S+): no stage or image found"
)
_START = re.compile(r"STEP \d+/\d+: FROM (\S+)(?: AS (\S+))?", re.IGNORECASE)
_STEP = re.compile(r'building at STEP "(.*?)": ', re.DOTALL)
_LOG = re.compile(r"^(Getting image source|Copying |Writing manifest|Storing sign).*\n", re.MULTILINE)


async def build_image(
    context: Path,
    name: str,
    store: ImageStore,
    *,
    dockerfile: str = "Dockerfile",
    args: Mapping[str, str] | None = None,
    target: str | None = None,
    options: BuildOptions | None = None,
    on_line: OnLine | None = None,
) -> Image:
    """Builds the Dockerfile of the directory `context`, and saves the image in the store under `name`.

    `dockerfile`: its path in `context`; `args`: values of ARGs; `target`: a stage (default: the last).
    `on_line` is called with each line of output. Raises TemplateError for an instruction that fails (with the
    end of its output), a missing base, an image for another machine, a timeout; ResourceError if buildah is
    missing or cannot run.
    """
    check_name(name)
    options = options or BuildOptions()
    _check_files(context, dockerfile, options)
    build = BuildInputs(context, dockerfile, args or {}, target, options)
    try:
        key = await asyncio.to_thread(build.find_key, store)
    except OSError as error:
        raise TemplateError(
            f"cannot be read: {error.strerror}", field="context", received=str(error.filename)
        ) from error
    if not options.fresh and key and (known := await asyncio.to_thread(find_build, store, key, name)):
        return known
    image = await _build_in_two(build, name, store, on_line)
    if image is None:
        image = await _build_whole(build, name, store, on_line)
    if key and await asyncio.to_thread(build.find_key, store) == key:  # the context has not changed meanwhile
        await asyncio.to_thread(record_build, store, key, image)
    return image


async def _build_in_two(
    build: BuildInputs, name: str, store: ImageStore, on_line: OnLine | None
) -> Image | None:
    """Builds a Dockerfile that ends with a copy of a directory: its beginning is built once for all with the
    same beginning, and the copy added as a layer. None for any other Dockerfile."""
    if build.args or build.target:
        return None
    last = await asyncio.to_thread(LastCopy.find, build.context, build.dockerfile)
    if last is None:
        return None
    text = last.beginning.encode(errors="surrogateescape")
    beginning = f"beginning/{hashlib.sha256(text).hexdigest()[:32]}"
    with store.layers.scratch() as folder:
        (folder / "Dockerfile").write_bytes(text)
        image = await build_image(folder, beginning, store, options=build.options, on_line=on_line)
    return await asyncio.to_thread(last.add_to, image, name, store)


async def _build_whole(build: BuildInputs, name: str, store: ImageStore, on_line: OnLine | None) -> Image:
    root, options = store.layers.root, build.options
    try:
        with open_proxy(options, root, name) as proxy:
            async with (
                asyncio.timeout(options.deadline_s) as limit,
                open_buildah(root / BUILDAH, proxy) as buildah,
            ):
                run = _BuildRun(buildah, store, options, build.dockerfile, limit)
                words = await asyncio.to_thread(run.make_arguments, build.context, build.args, build.target)
                return await run.build(words, name, on_line)
    except TimeoutError as error:
        raise TemplateError(
            f"the build took longer than {options.deadline_s:g} s and was ended", field=build.dockerfile,
            received=str(build.context),
            fix="shorten it, or allow more time with `--timeout` (tasks: `environment.build_timeout_sec`)",
        ) from error  # fmt: skip


@contextlib.contextmanager
def open_proxy(options: BuildOptions, root: Path, name: str) -> Iterator[EgressProxy | None]:
    """The proxy of a build's network; None without one. Adds refused addresses to the error of the build."""
    allow, private = options.network.allow, options.allow_private
    if not allow:
        yield None
        return
    with contextlib.closing(RequestLog.to_file(root / "network.jsonl")) as log:
        try:
            yield EgressProxy(allow, log, f"build of {name}", allow_private=private)
        except TemplateError as error:
            if not log.refused:
                raise
            refused = ", ".join(f"{place} ({reason})" for place, reason in log.refused.items())
            raise TemplateError(
                error.message, field=error.field, received=error.received,
                fix=f"allow what the build was refused, {refused}: no_rule by HOST:PORT in `images.allow` or "
                "`--allow` (HOST alone is port 443), address_... by IP:PORT in `images.allow_private` or "
                "`--allow-private`",
            ) from error  # fmt: skip


class _BuildRun:
    """One build by buildah."""

    def __init__(
        self,
        buildah: Buildah,
        store: ImageStore,
        options: BuildOptions,
        dockerfile: str,
        limit: asyncio.Timeout,
    ) -> None:
        self.buildah = buildah
        self.store = store
        self.options = options
        self.dockerfile = dockerfile
        self._limit = limit
        self._names = buildah.root / "names.json"
        self._result = buildah.own / "id"

    def make_arguments(self, context: Path, args: Mapping[str, str], target: str | None) -> list[str]:
        """Copies the input files; the command line of the build. Raises TemplateError. Blocks."""
        inside = self.buildah.inside
        try:
            folder = self.buildah.copy_in(context)
            volumes = {path: self.buildah.copy_in(source) for path, source in self.options.volumes.items()}
        except OSError as error:  # shutil's own error has one row for each file
            raise TemplateError(
                f"cannot be read: {str(error)[:500]}", field="context", received=str(context)
            ) from error
        return bud_arguments(
            inside(folder),
            self.dockerfile,
            inside(self._result),
            {path: inside(source) for path, source in volumes.items()},
            args,
            ["--no-cache"] * self.options.fresh + ([f"--target={target}"] if target else []),
        )

    async def build(self, words: list[str], name: str, on_line: OnLine | None) -> Image:
        """Runs the build, supplies the missing base images, and imports the image into the store."""
        await self._untag_changed_bases()
        given: set[str] = set()
        while True:
            starts: list[str] = []

            def read(line: str, starts: list[str] = starts) -> None:
                starts += [line] if _START.search(line) else []
                if on_line is not None:
                    on_line(show_line(line))

            status, output = await self.buildah.run(*words, on_line=read)
            lacks = find_missing(starts, output, await asyncio.to_thread(read_record, self._names)) - given
            if not lacks and status:
                raise explain_failure(self.dockerfile, output, status)
            if not lacks:
                break
            async with self._paused_limit():
                for base in sorted(lacks):
                    await self._supply_base(base)
            given |= lacks
        image_id = (await asyncio.to_thread(_read_own, self._result)).strip().removeprefix("sha256:")
        return await self._import_result(image_id, name)

    @contextlib.asynccontextmanager
    async def _paused_limit(self) -> AsyncIterator[None]:
        """Stops the build's time limit during the block."""
        clock, ends_s = asyncio.get_running_loop().time, self._limit.when()
        assert ends_s is not None
        left_s = ends_s - clock()
        self._limit.reschedule(None)
        yield
        self._limit.reschedule(clock() + left_s)

    async def _import_result(self, image_id: str, name: str) -> Image:
        """Imports the built image into the store, unless it is there from an equal build."""
        if known := await asyncio.to_thread(find_build, self.store, image_id, name):
            return known
        result = self.buildah.own / "result"
        place = f"oci:{self.buildah.inside(result)}"
        await self._run_checked("push", "--quiet", "--disable-compression", image_id, place)
        image = await asyncio.to_thread(import_image, result, self.store, name)
        await asyncio.to_thread(record_build, self.store, image_id, image)
        return image

    async def _supply_base(self, name: str) -> None:
        """Imports the image that FROM names into buildah. Raises TemplateError if it is not available."""
        file = BaseFile.find(self.options.bases.get(name))
        if file is not None:
            given = await asyncio.to_thread(self.buildah.copy_in, file.path)
            transport, fingerprint, tag = file.transport, file.fingerprint(), file.tag
        else:
            image = await find_in_store(self.options.bases.get(name, name), self.store)
            given = self.buildah.make_folder() / "given"
            await asyncio.to_thread(export_image, replace(image, name="base"), self.store, given)
            self.buildah.open_folder(given)
            transport, fingerprint, tag = "oci-archive", image.digest, ""
        source = f"{transport}:{self.buildah.inside(given)}" + (f":{tag}" if tag else "")
        image_id = (await self._run_checked("pull", "--quiet", source, base=name)).split()[-1]
        form = "--format={{.OCIv1.Architecture}}"
        machine = (await self._run_checked("inspect", "--type=image", form, image_id)).strip()
        if machine != architecture():
            raise TemplateError(
                f"the base image is for {machine}, and this machine is {architecture()}",
                field="images.bases", received=name, fix=f"name an image for linux/{architecture()}",
            )  # fmt: skip
        await self._run_checked("tag", image_id, full_name(name), base=name)
        await asyncio.to_thread(self._update_names, {name: fingerprint})

    async def _untag_changed_bases(self) -> None:
        """Removes buildah's names of base images that have changed since they were supplied."""
        for name, fingerprint in (await asyncio.to_thread(read_record, self._names)).items():
            found = await asyncio.to_thread(find_fingerprint, name, self.options.bases, self.store)
            if found != fingerprint:
                await self.buildah.run("rmi", "--force", full_name(name))
                await asyncio.to_thread(self._update_names, {name: None})

    def _update_names(self, changes: Mapping[str, str | None]) -> None:
        names = {**read_record(self._names), **changes}
        write_json(self._names, {name: known for name, known in names.items() if known is not None})

    async def _run_checked(self, *words: str, base: str | None = None) -> str:
        """Runs a command that must succeed. Raises TemplateError."""
        status, output = await self.buildah.run(*words)
        if status:
            raise TemplateError(
                f"buildah {words[0]} fails: {_tail(output)}", field="images.bases" if base else "image",
                received=base, fix=f"check that the image is complete and built for linux/{architecture()}",
            )  # fmt: skip
        return output


def _read_own(path: Path) -> str:
    """Reads a short file from an untrusted directory, without following a link. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        return file.read(100)


def bud_arguments(
    context: str,
    dockerfile: str,
    result: str,
    volumes: Mapping[str, str],
    args: Mapping[str, str],
    more: Sequence[str] = (),
) -> list[str]:
    """The arguments of `buildah bud`; all paths as buildah sees them, `volumes` by their path in the image.

    `result`: the file for the image's id.
    """
    words = [*_BUD, f"--ulimit={_LIMITS}", f"--iidfile={result}", f"--file={context}/{dockerfile}", *more]
    words += [f"--build-arg={key}={value}" for key, value in sorted(args.items())]
    words += [f"--volume={source}:{path}:ro" for path, source in sorted(volumes.items())]
    return [*words, context]


def find_missing(starts: Sequence[str], output: str, supplied: Container[str]) -> set[str]:
    """Base images that a build needs and that are not in `supplied`: those that buildah reports as missing,
    and those for which it used an image whose name merely has this ending. `starts`: its lines with FROM."""
    missing = {name for found in _LACKS.finditer(output) for name in found.groups() if name}
    stages = {"scratch"}
    for line in starts:
        for name, stage in _START.findall(line):
            if name.lower() not in stages and name not in supplied:
                missing.add(name)
            stages.add(stage.lower())
    return missing


def show_line(line: str) -> str:
    """A line of buildah's output as shown to the user: a missing base image is not an error yet."""
    lacking = _LACKS.search(line)
    name = lacking and (lacking["base"] or lacking["source"])
    return (
        f"getting {name}: configured in images.bases, stored, or built from Debian packages (minutes)"
        if name
        else line
    )


def _check_files(context: Path, dockerfile: str, options: BuildOptions) -> None:
    """Raises TemplateError for missing files."""
    if not (context / dockerfile).is_file():
        raise TemplateError(
            "no such Dockerfile", field="context", received=str(context / dockerfile),
            fix="name a directory that contains one, and the path of the file in it",
        )  # fmt: skip
    for path, source in options.volumes.items():
        if not source.exists() or not path.startswith("/") or ":" in path:
            raise TemplateError(
                "no such file, or a relative path inside", field="volumes", received=f"{source}:{path}",
                fix="write HOST:INSIDE, for example /etc/pip.conf:/etc/pip.conf",
            )  # fmt: skip


def explain_failure(dockerfile: str, output: str, status: int) -> TemplateError:
    """The error of a build that failed."""
    lacks = _LACKS.search(output)
    step = _STEP.findall(output)
    received = step[-1][:500] if step else lacks[0] if lacks else f"exit status {status}"
    return TemplateError(
        f"the build failed; its output ends with: {_tail(output)}", field=dockerfile, received=received,
        fix="correct the instruction; put what it needs into the base image, or allow its host with "
        "`--allow HOST` of `etude sandbox image build`, for tasks with `images.allow` in the configuration",
    )  # fmt: skip


def _tail(output: str) -> str:
    return _LOG.sub("", output)[-_TAIL_CHARS:].strip() or "(nothing)"
