"""The Docker Engine API, the part that sandboxes need: containers, images, archives. Docker's and podman's.

Spoken: version 1.47 or the highest that the engine offers below it (Docker 20.10, and podman's compatible
API, offer 1.41; Docker 29 refuses anything below 1.44).
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import tarfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from etude.errors import ConfigError
from etude.sandbox.docker.http import CHUNK_BYTES, ApiError, Response, UnixHttp
from etude.sandbox.errors import SandboxMissingError, TemplateError

API_VERSION = (1, 47)
OLDEST_API = (1, 41)
CALL_S = 60.0
"""For calls that only change what the engine knows."""
TRANSFER_S = 900.0
"""For calls that move or build whole images."""
_TAR = "application/x-tar"


class EngineError(ApiError):
    """The engine refused a request."""


class Engine:
    """One engine behind its socket. Every call has a deadline; a refusal raises EngineError."""

    def __init__(self, socket: Path) -> None:
        self._http = UnixHttp(socket, "engine")
        self._prefix: str | None = None
        self._negotiating = asyncio.Lock()

    # The engine itself

    async def ping(self) -> str:
        """Its newest API version. Raises HttpError if nobody answers."""
        answer = await self._http.request("GET", "/_ping", deadline_s=CALL_S)
        if answer.status != 200:
            raise self._refusal(answer, "ping", None)
        return answer.fields.get("api-version", "1.41")

    async def version(self) -> dict[str, Any]:
        """What `docker version` shows of the server."""
        return (await self._call("GET", "/version")).json()

    # Containers

    async def create_container(self, name: str, config: Mapping[str, Any]) -> str:
        """Makes a container: its id. Raises TemplateError if its image is not there."""
        answer = await self._ask("POST", "/containers/create", dict(config), query={"name": name})
        if answer.status == 404:
            raise _missing_image(str(config.get("Image")), answer.message())
        return str(self._checked(answer, "create a container", name, 201).json()["Id"])

    async def start(self, container: str) -> None:
        """Starts it; one that runs already stays as it is. Raises TemplateError if its program is missing."""
        answer = await self._ask("POST", f"/containers/{container}/start")
        if answer.status in (400, 404) and "executable file not found" in answer.message():
            raise TemplateError(
                answer.message(),
                field="sandbox.image",
                received=container,
                fix="use an image with python3 on its path, or name its interpreter",
            )
        self._checked(answer, "start the container", container, 204, 304)

    async def attach(self, container: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The container's standard streams (see `frames`), as a connection of our own."""
        query = {"stream": "1", "stdin": "1", "stdout": "1", "stderr": "1"}
        target = f"{await self._base()}/containers/{container}/attach"
        return await self._http.hijack("POST", target, query, CALL_S)

    async def wait(self, container: str, deadline_s: float = CALL_S) -> int:
        """Waits for its end: the exit code. Raises HttpError after `deadline_s`."""
        answer = await self._call("POST", f"/containers/{container}/wait", deadline_s=deadline_s)
        return int(answer.json()["StatusCode"])

    async def kill(self, container: str) -> None:
        """Kills it; one that is gone or has ended is fine."""
        answer = await self._ask("POST", f"/containers/{container}/kill", query={"signal": "KILL"})
        self._checked(answer, "kill the container", container, 204, 404, 409)

    async def remove(self, container: str) -> None:
        """Kills and removes it with its volumes; one that is gone, or being removed, is fine."""
        query = {"force": "1", "v": "1"}
        answer = await self._ask("DELETE", f"/containers/{container}", query=query)
        self._checked(answer, "remove the container", container, 204, 404, 409)

    async def pause(self, container: str) -> None:
        """Freezes all of its processes; their memory stays."""
        await self._call("POST", f"/containers/{container}/pause")

    async def unpause(self, container: str) -> None:
        """Lets them go on."""
        await self._call("POST", f"/containers/{container}/unpause")

    async def inspect_container(self, container: str) -> dict[str, Any]:
        """All that the engine knows of it. Raises SandboxMissingError if there is none."""
        answer = await self._ask("GET", f"/containers/{container}/json")
        if answer.status == 404:
            raise SandboxMissingError(answer.message(), field="container", received=container)
        return self._checked(answer, "inspect the container", container, 200).json()

    async def list_containers(self, label: str) -> list[dict[str, Any]]:
        """Containers that bear a label (`key` or `key=value`), whatever their state."""
        query = {"all": "1", "filters": json.dumps({"label": [label]})}
        return (await self._call("GET", "/containers/json", query=query)).json()

    async def put_archive(self, container: str, archive: bytes, path: str = "/") -> None:
        """Unpacks a tar archive below `path`; owners and modes are the archive's."""
        target = f"/containers/{container}/archive"
        answer = await self._ask("PUT", target, query={"path": path}, content=archive, content_type=_TAR)
        self._checked(answer, "copy files into the container", container, 200)

    async def commit(self, container: str, repository: str, tag: str) -> str:
        """Makes an image of the container's files, which stands still meanwhile: the image's id."""
        query = {"container": container, "repo": repository, "tag": tag, "pause": "1"}
        answer = await self._ask("POST", "/commit", {}, query=query, deadline_s=TRANSFER_S)
        return str(self._checked(answer, "commit the container", container, 201).json()["Id"])

    # Images

    async def inspect_image(self, image: str) -> dict[str, Any]:
        """All that the engine knows of an image. Raises TemplateError if it has none of that name."""
        answer = await self._ask("GET", f"/images/{quote(image, safe='/:@')}/json")
        if answer.status == 404:
            raise _missing_image(image, answer.message())
        return self._checked(answer, "inspect the image", image, 200).json()

    async def pull(self, image: str) -> None:
        """Fetches an image from its registry: only ever when asked to. Raises TemplateError."""
        name, _, digest = image.partition("@")
        repository, colon, tag = name.rpartition(":")
        if not colon or "/" in tag:
            repository, tag = name, "latest"
        query = {"fromImage": repository, "tag": digest or tag}
        await self._follow("POST", "/images/create", query, None, f"the image {image} cannot be pulled")

    async def build(
        self, context: Path, tag: str, dockerfile: str = "Dockerfile", network: bool = False
    ) -> str:
        """Builds a directory's Dockerfile with the engine's own builder: the image's id.

        For Dockerfiles that our interpreter refuses. Bases are not pulled; without `network` RUN has none.
        Raises ConfigError if `context` is no directory, TemplateError with the end of the build's output.
        """
        if not (context / dockerfile).is_file():
            raise ConfigError(
                "no such Dockerfile",
                field="dockerfile",
                received=str(context / dockerfile),
                fix="name the directory that holds it",
            )
        archive = await asyncio.to_thread(_pack_context, context)
        query = {"t": tag, "dockerfile": dockerfile, "rm": "1", "forcerm": "1", "pull": "0"}
        if not network:
            query["networkmode"] = "none"
        await self._follow("POST", "/build", query, archive, f"{context / dockerfile} does not build")
        return str((await self.inspect_image(tag))["Id"])

    async def remove_image(self, image: str) -> None:
        """Removes an image, or takes a name from it; one that is gone is fine."""
        answer = await self._ask("DELETE", f"/images/{quote(image, safe='/:@')}")
        self._checked(answer, "remove the image", image, 200, 404)

    async def tag(self, image: str, repository: str, tag: str) -> None:
        """Gives an image a name."""
        query = {"repo": repository, "tag": tag}
        answer = await self._ask("POST", f"/images/{quote(image, safe='/:@')}/tag", query=query)
        self._checked(answer, "tag the image", image, 201)

    async def save_image(self, image: str, target: Path) -> None:
        """Writes an image with all its layers to a file. Raises TemplateError if there is none."""
        path = f"{await self._base()}/images/{quote(image, safe='/:@')}/get"
        async with (
            self._http.deadline(TRANSFER_S, "GET", path),
            self._http.stream("GET", path) as opened,
        ):
            if opened.status_code != 200:
                answer = Response(opened.status_code, opened.headers, await opened.aread())
                if answer.status == 404:
                    raise _missing_image(image, answer.message())
                raise self._refusal(answer, "save the image", image)
            with target.open("wb") as file:
                async for piece in opened.aiter_bytes():
                    await asyncio.to_thread(file.write, piece)

    async def load_image(self, source: Path) -> None:
        """Takes in what `save_image` wrote."""

        async def pieces() -> AsyncIterator[bytes]:
            with source.open("rb") as file:
                while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield piece

        await self._follow("POST", "/images/load", {"quiet": "1"}, pieces(), "the image cannot be loaded")

    # Inner workings

    async def _base(self) -> str:
        """The path's prefix with the API version, agreed upon once."""
        async with self._negotiating:
            if self._prefix is None:
                offered = await self.ping()
                version = _version_pair(offered)
                if version < OLDEST_API:
                    raise EngineError(
                        f"the engine speaks API {offered} only",
                        field="engine",
                        received=offered,
                        fix="use Docker 20.10, podman 3 or newer",
                    )
                major, minor = min(version, API_VERSION)
                self._prefix = f"/v{major}.{minor}"
        return self._prefix

    async def _ask(
        self,
        method: str,
        target: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        deadline_s: float = CALL_S,
        content: bytes | None = None,
        content_type: str = "application/json",
    ) -> Response:
        return await self._http.request(
            method,
            await self._base() + target,
            body,
            query=query,
            deadline_s=deadline_s,
            content=content,
            content_type=content_type,
        )

    async def _call(
        self,
        method: str,
        target: str,
        *,
        query: Mapping[str, str] | None = None,
        deadline_s: float = CALL_S,
    ) -> Response:
        answer = await self._ask(method, target, query=query, deadline_s=deadline_s)
        return self._checked(answer, f"{method} {target}", None, 200, 204)

    async def _follow(
        self,
        method: str,
        target: str,
        query: Mapping[str, str],
        content: bytes | AsyncIterator[bytes] | None,
        failure: str,
    ) -> None:
        """A call that answers with a stream of JSON lines, one of which may be an error after status 200."""
        base = await self._base()
        async with (
            self._http.deadline(TRANSFER_S, method, target),
            self._http.stream(
                method, base + target, query=query, content=content, content_type=_TAR
            ) as answer,
        ):
            said = await answer.aread()
        lines = _json_lines(said)
        errors = [str(line["error"]) for line in lines if line.get("error")]
        if answer.status_code != 200:
            errors.append(Response(answer.status_code, answer.headers, said).message())
        if errors:
            output = "".join(str(line.get("stream", "")) for line in lines)[-1500:]
            raise TemplateError(
                f"{failure}: {errors[-1]}",
                field="sandbox.image",
                received=output or None,
                fix="see the output; a base image must be pulled or loaded first",
            )

    def _checked(self, answer: Response, what: str, received: object, *allowed: int) -> Response:
        if answer.status not in allowed:
            raise self._refusal(answer, what, received)
        return answer

    def _refusal(self, answer: Response, what: str, received: object) -> EngineError:
        return EngineError(
            f"the engine does not {what}: {answer.message()}",
            field="engine",
            received=received if received is not None else answer.status,
            status=answer.status,
        )


def _version_pair(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _missing_image(image: str, message: str) -> TemplateError:
    return TemplateError(
        message,
        field="sandbox.image",
        received=image,
        fix="pull it, load it or build it: nothing is fetched unasked",
    )


def _json_lines(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a progress stream; what is none is passed over (podman mixes in blank lines)."""
    found: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _pack_context(context: Path) -> bytes:
    """A build context as a tar archive, in a fixed order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(context.rglob("*")):
            archive.add(path, arcname=path.relative_to(context).as_posix(), recursive=False)
    return buffer.getvalue()
