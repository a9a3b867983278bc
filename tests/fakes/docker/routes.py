"""The routes of the fake engine: one handler for each request of the API that it knows."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.fakes.docker.containers import FakeContainer, Refusal
from tests.fakes.docker.http import Head, pack_head
from tests.fakes.docker.images import BuildError, full_name

if TYPE_CHECKING:
    from tests.fakes.docker.engine import FakeEngine

MIN_API_VERSION = "1.24"
_NAME = re.compile(r"/?[a-zA-Z0-9][a-zA-Z0-9_.-]+")


@dataclass
class Call:
    """A request, taken apart."""

    path: str
    query: dict[str, str]
    body: bytes
    head: Head
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    match: re.Match[str]

    @property
    def method(self) -> str:
        """GET, POST, ..."""
        return self.head.first[0]

    def json(self) -> dict[str, Any]:
        """The body. Raises Refusal."""
        try:
            return json.loads(self.body or b"{}")
        except ValueError as error:
            raise Refusal(400, f"invalid JSON: {error}") from error


Answer = tuple[int, object]
Handler = Callable[["FakeEngine", Call], Awaitable[Answer | None]]


async def _ping(engine: FakeEngine, call: Call) -> Answer:
    return 200, "OK"


async def _version(engine: FakeEngine, call: Call) -> Answer:
    return 200, {
        "Version": "27.5.1",
        "ApiVersion": engine.api_version,
        "MinAPIVersion": MIN_API_VERSION,
        "Os": "linux",
        "Arch": "amd64",
        "Components": [],
    }


async def _create(engine: FakeEngine, call: Call) -> Answer:
    config = call.json()
    name = call.query.get("name") or f"fake_{secrets.token_hex(4)}"
    if not _NAME.fullmatch(name):
        raise Refusal(400, f"Invalid container name ({name}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed")
    for other in engine.containers.values():
        if other.name == name:
            raise Refusal(
                409,
                f'Conflict. The container name "/{name}" is already in use by container "{other.id}". '
                "You have to remove (or rename) that container to be able to reuse that name.",
            )
    image = engine.images.find(str(config.get("Image")))
    if image is None:
        raise Refusal(404, f"No such image: {full_name(str(config.get('Image')))}")
    container = FakeContainer(name, image, config, engine.directory / "containers", engine.forget)
    engine.containers[container.id] = container
    return 201, {"Id": container.id, "Warnings": []}


async def _start(engine: FakeEngine, call: Call) -> Answer:
    container = engine.find(call.match[1])
    if container.state == "running":
        return 304, None
    await container.start()
    return 204, None


async def _attach(engine: FakeEngine, call: Call) -> Answer | None:
    container = engine.find(call.match[1])
    upgraded = "upgrade" in call.head.fields.get("connection", "").lower()
    first = "HTTP/1.1 101 UPGRADED" if upgraded else "HTTP/1.1 200 OK"
    fields = {"Content-Type": "application/vnd.docker.multiplexed-stream"}
    if upgraded:
        fields |= {"Connection": "Upgrade", "Upgrade": "tcp"}
    call.writer.write(pack_head(first, fields))
    await call.writer.drain()
    await container.attach(call.reader, call.writer, call.query.get("stdin") in ("1", "true"))
    return None


async def _wait(engine: FakeEngine, call: Call) -> Answer | None:
    container = engine.find(call.match[1])
    condition = call.query.get("condition", "not-running")
    # The head goes out at once, as the real engine does: clients wait for it before they start.
    call.writer.write(
        pack_head("HTTP/1.1 200 OK", {"Content-Type": "application/json", "Connection": "close"})
    )
    await call.writer.drain()
    await (container.removed if condition == "removed" else container.ended).wait()
    call.writer.write(json.dumps({"StatusCode": container.exit_code}).encode())
    await call.writer.drain()
    return None


async def _kill(engine: FakeEngine, call: Call) -> Answer:
    container = engine.find(call.match[1])
    if container.state not in ("running", "paused"):
        raise Refusal(409, f"cannot kill container: {call.match[1]}: container {container.id} is not running")
    await container.kill()
    return 204, None


async def _remove(engine: FakeEngine, call: Call) -> Answer:
    container = engine.find(call.match[1])
    if container.state in ("running", "paused"):
        if call.query.get("force") not in ("1", "true"):
            raise Refusal(
                409,
                f'cannot remove container "/{container.name}": container is running: '
                "stop the container before removing or force remove",
            )
        await container.kill()
    engine.forget(container)
    return 204, None


async def _pause(engine: FakeEngine, call: Call) -> Answer:
    engine.find(call.match[1]).freeze(signal.SIGSTOP)
    return 204, None


async def _unpause(engine: FakeEngine, call: Call) -> Answer:
    engine.find(call.match[1]).freeze(signal.SIGCONT)
    return 204, None


async def _inspect(engine: FakeEngine, call: Call) -> Answer:
    return 200, engine.find(call.match[1]).describe()


async def _list(engine: FakeEngine, call: Call) -> Answer:
    wanted = json.loads(call.query.get("filters", "{}")).get("label", [])
    labels = list(wanted) if isinstance(wanted, (list, dict)) else []
    everything = call.query.get("all") in ("1", "true")
    rows = [
        container.summary()
        for container in engine.containers.values()
        if container.has_labels(labels) and (everything or container.state in ("running", "paused"))
    ]
    return 200, rows


async def _put_archive(engine: FakeEngine, call: Call) -> Answer:
    engine.find(call.match[1]).unpack(call.query["path"], call.body)
    return 200, ""


async def _get_archive(engine: FakeEngine, call: Call) -> Answer | None:
    container, path = engine.find(call.match[1]), call.query["path"]
    status = base64.b64encode(json.dumps(container.stat(path)).encode()).decode()
    data = container.pack(path)
    fields = {"X-Docker-Container-Path-Stat": status, "Content-Type": "application/x-tar"}
    fields |= {"Content-Length": str(len(data)), "Connection": "close"}
    call.writer.write(pack_head("HTTP/1.1 200 OK", fields) + (b"" if call.method == "HEAD" else data))
    await call.writer.drain()
    return None


async def _commit(engine: FakeEngine, call: Call) -> Answer:
    container = engine.find(call.query.get("container", ""))
    name = f"{call.query.get('repo') or secrets.token_hex(6)}:{call.query.get('tag') or 'latest'}"
    running = container.state == "running"
    if running:
        container.freeze(signal.SIGSTOP)
    try:
        config = {
            key: container.config.get(key) for key in ("Env", "Cmd", "Entrypoint", "WorkingDir", "Labels")
        }
        config["Env"] = container.environment()
        image = await asyncio.to_thread(engine.images.add, name, config, container.root)
    finally:
        if running:
            container.freeze(signal.SIGCONT)
    return 201, {"Id": image.id}


async def _inspect_image(engine: FakeEngine, call: Call) -> Answer:
    image = engine.images.find(call.match[1])
    if image is None:
        raise Refusal(404, f"No such image: {full_name(call.match[1])}")
    return 200, engine.images.describe(image)


async def _remove_image(engine: FakeEngine, call: Call) -> Answer:
    reference = call.match[1]
    image = engine.images.find(reference)
    if image is None:
        raise Refusal(404, f"No such image: {full_name(reference)}")
    users = [c for c in engine.containers.values() if c.image is image and c.state in ("running", "paused")]
    if users and len(engine.images.names_of(image)) == 1:
        raise Refusal(
            409,
            f'conflict: unable to remove repository reference "{reference}" (must force) - '
            f"container {users[0].id[:12]} is using its referenced image {image.id[7:19]}",
        )
    return 200, engine.images.remove(reference)


async def _list_images(engine: FakeEngine, call: Call) -> Answer:
    rows = [
        engine.images.describe(image) | {"Created": int(time.time()), "Containers": -1, "SharedSize": -1}
        for image in engine.images.by_id.values()
    ]
    return 200, rows


async def _tag(engine: FakeEngine, call: Call) -> Answer:
    image = engine.images.find(call.match[1])
    if image is None:
        raise Refusal(404, f"No such image: {full_name(call.match[1])}")
    engine.images.names[full_name(f"{call.query['repo']}:{call.query.get('tag') or 'latest'}")] = image.id
    return 201, ""


async def _save(engine: FakeEngine, call: Call) -> Answer:
    name = call.query.get("names") or call.match[1]
    image = engine.images.find(name)
    if image is None:
        raise Refusal(404, f"reference does not exist: {name}")
    return 200, engine.images.save(image)


async def _load(engine: FakeEngine, call: Call) -> Answer:
    try:
        names = engine.images.load(call.body)
    except BuildError as error:
        raise Refusal(400, str(error)) from error
    return 200, _progress([{"stream": f"Loaded image: {name}\n"} for name in names])


async def _pull(engine: FakeEngine, call: Call) -> Answer:
    name = full_name(f"{call.query['fromImage']}:{call.query.get('tag') or 'latest'}")
    if name not in engine.registry:
        raise Refusal(404, f"manifest for {name} not found: manifest unknown: manifest unknown")
    engine.images.add(name)
    return 200, _progress([{"status": f"Status: Downloaded newer image for {name}"}])


async def _build(engine: FakeEngine, call: Call) -> Answer:
    try:
        image, said = await asyncio.to_thread(
            engine.images.build, call.body, call.query.get("dockerfile", "Dockerfile"), call.query["t"]
        )
    except BuildError as error:
        # The real engine has sent status 200 by then: the error is a line of the stream.
        return 200, _progress([{"errorDetail": {"message": str(error)}, "error": str(error)}])
    return 200, _progress([*({"stream": line} for line in said), {"aux": {"ID": image.id}}])


def _progress(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\r\n" for row in rows)


_ROUTES: list[tuple[str, str, Handler]] = [
    ("GET|HEAD", "/_ping", _ping),
    ("GET", "/version", _version),
    ("POST", "/containers/create", _create),
    ("GET", "/containers/json", _list),
    ("POST", "/containers/([^/]+)/start", _start),
    ("POST", "/containers/([^/]+)/attach", _attach),
    ("POST", "/containers/([^/]+)/wait", _wait),
    ("POST", "/containers/([^/]+)/kill", _kill),
    ("POST", "/containers/([^/]+)/pause", _pause),
    ("POST", "/containers/([^/]+)/unpause", _unpause),
    ("GET", "/containers/([^/]+)/json", _inspect),
    ("PUT", "/containers/([^/]+)/archive", _put_archive),
    ("GET|HEAD", "/containers/([^/]+)/archive", _get_archive),
    ("DELETE", "/containers/([^/]+)", _remove),
    ("POST", "/commit", _commit),
    ("POST", "/build", _build),
    ("GET", "/images/json", _list_images),
    ("POST", "/images/load", _load),
    ("POST", "/images/create", _pull),
    ("GET", "/images/(.+)/json", _inspect_image),
    ("GET", "/images/(.+)/get", _save),
    ("GET", "/images/(get)", _save),
    ("POST", "/images/(.+)/tag", _tag),
    ("DELETE", "/images/(.+)", _remove_image),
]


def find_route(method: str, path: str) -> tuple[re.Match[str], Handler]:
    for methods, pattern, handler in _ROUTES:
        match = re.fullmatch(pattern, path)
        if match is not None and method in methods.split("|"):
            return match, handler
    raise Refusal(404, "page not found")
