"""All seven servers on loopback ports as a hostile client meets them, with secrets of another tenant."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from etude.config.routing import HealthCheckConfig, RouterConfig
from etude.controller.clusters.control import Control
from etude.controller.clusters.intake import Inbox
from etude.controller.clusters.server import build_app as control_app
from etude.environment.recording.server import build_app as recording_app
from etude.environment.server import HostLimits
from etude.environment.server import build_app as environment_app
from etude.inference.router.server import Proxy, ReplicaAddress
from etude.inference.router.server import build_app as router_app
from etude.inference.server import Keys
from etude.inference.server import build_app as inference_app
from etude.inference.server.limits import Key, KeyLimits
from etude.sandbox.server import build_app as sandbox_app
from etude.serving.process import ServerThread
from etude.weights.folders import DirectoryFolder
from etude.weights.relay import Relay
from etude.weights.server import RelayServer
from etude_quickstart.memory_backend import MemoryBackend
from tests.controller.clusters.playing import FINGERPRINT, OFFER
from tests.controller.clusters.test_server import SETTINGS
from tests.environment.recording.recording_builders import TellingSampler, make_recordings
from tests.environment.server.serving import new_host
from tests.inference.server.serving import ADMIN, PlayedSampler, make_state

TOKEN, OTHER_TOKEN = "a-token-of-the-first-tenant", "a-token-of-the-second-tenant"
SECRET = "SECRETOFTWO"
SERVERS = ("sandbox", "environment", "inference", "recording", "router", "relay", "control")
_LIMIT_S = 60.0


@dataclass
class Server:
    """One server that runs, and what requests to it may name."""

    name: str
    url: str
    path: str
    """A route of its own that answers 200 to the first tenant's GET."""
    token: str = TOKEN
    names: dict[str, str] = field(default_factory=dict)
    """What stands for `{word}` in a path, a body or a header."""

    @property
    def port(self) -> int:
        """Of the loopback address."""
        return int(self.url.rpartition(":")[2])


class Pulse:
    """Asks a server for its health again and again, and keeps the longest that it took.

    Counted is the processor time of this process while it waited: what other processes take of a busy machine
    holds up nobody's loop.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.longest_s = 0.0
        self.failure: str | None = None

    def __enter__(self) -> Pulse:
        self._thread.start()
        assert self._begun.wait(_LIMIT_S), "the server does not answer before anything was asked"
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_LIMIT_S)

    def _ask(self) -> None:
        while not self._ended.is_set():
            start_s = time.process_time()
            line = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=_LIMIT_S)
            try:
                line.request("GET", "/health")
                answer = line.getresponse()
                answer.read()
                self.failure = self.failure or (None if answer.status == 200 else f"answered {answer.status}")
            except (OSError, http.client.HTTPException) as error:
                self.failure = repr(error)
            finally:
                line.close()
            if self._begun.is_set():
                self.longest_s = max(self.longest_s, time.process_time() - start_s)
            self._begun.set()
            self._ended.wait(0.02)


@contextlib.contextmanager
def serving(directory: Path, *names: str) -> Iterator[dict[str, Server]]:
    """The servers of these names, all of them without any."""
    wanted = names or SERVERS
    with ExitStack() as stack:
        found: dict[str, Server] = {}
        for name in SERVERS:
            if name in wanted or (name == "inference" and "router" in wanted):
                found[name] = _BEGIN[name](stack, directory / name, found)
        yield found


def _begin(stack: ExitStack, name: str, app: FastAPI, path: str, **more: Any) -> Server:
    thread = stack.enter_context(ServerThread(app))
    return Server(name, thread.url, path, **more)


def _ask(server: Server, method: str, path: str, token: str | None = None, **more: Any) -> Any:
    headers = {"authorization": f"Bearer {token or server.token}"}
    answer = httpx.request(method, server.url + path, headers=headers, timeout=60, trust_env=False, **more)
    assert answer.is_success, f"{server.name}: {answer.status_code} {answer.text}"
    return answer.json() if answer.content else None


def _sandbox(stack: ExitStack, directory: Path, found: dict[str, Server]) -> Server:
    app = sandbox_app({"memory": MemoryBackend()}, TOKEN, spool=directory / "spool")
    server = _begin(stack, "sandbox", app, "/v1/sandboxes")
    template = {"name": "t", "files": {"a.py": "x = 1\n"}}
    server.names["box"] = _ask(server, "POST", "/v1/sandboxes", json={"template": template})["id"]
    return server


def _environment(stack: ExitStack, directory: Path, found: dict[str, Server]) -> Server:
    tokens = {TOKEN: "one", OTHER_TOKEN: SECRET}
    app = environment_app(new_host(limits=HostLimits()), tokens)
    server = _begin(stack, "environment", app, "/sessions")
    files = {"a.py": "x = 1\n", "secret.txt": SECRET}
    for name, token in (("mine", TOKEN), ("other", OTHER_TOKEN)):
        body = {"files": files if name == "other" else {"a.py": "x = 1\n"}, "instruction": name}
        server.names[name] = _ask(server, "POST", "/sessions", token, json=body)["id"]
    snapshot = _ask(server, "POST", f"/sessions/{server.names['other']}/snapshot", OTHER_TOKEN, json={})
    server.names["other_snapshot"] = snapshot["snapshot"]
    reset = _ask(server, "POST", "/openenv/reset", OTHER_TOKEN, json={"episode_id": "others-episode"})
    assert reset["observation"]["episode_id"] == "others-episode"
    return server


def _inference(stack: ExitStack, directory: Path, found: dict[str, Server]) -> Server:
    keys = {token: Key(name, token, KeyLimits()) for name, token in (("one", TOKEN), (SECRET, OTHER_TOKEN))}
    state = make_state(PlayedSampler(answers=lambda context: "well"), keys=Keys(keys))
    server = _begin(stack, "inference", inference_app(state), "/v1/models")
    headers = {"authorization": f"Bearer {OTHER_TOKEN}", "x-etude-extensions": "tokens"}
    body = {"messages": [{"role": "user", "content": SECRET}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, trust_env=False)
    server.names |= {"answer": answer.json()["id"], "admin": ADMIN}
    return server


def _recording(stack: ExitStack, directory: Path, found: dict[str, Server]) -> Server:
    sampler = TellingSampler(lambda context: "well")
    recordings = make_recordings(sampler, directory)
    recordings._tenants.update({TOKEN: "one", OTHER_TOKEN: SECRET})
    server = _begin(stack, "recording", recording_app(recordings), "/health")
    for name, token in (("mine", TOKEN), ("other", OTHER_TOKEN)):
        body = {"run": "r", "task": name, "metadata": {"note": SECRET if name == "other" else ""}}
        made = _ask(server, "POST", "/sessions", token, json=body)
        server.names |= {name: made["id"], f"{name}_key": made["key"]}
    return server


def _router(stack: ExitStack, directory: Path, found: dict[str, Server]) -> Server:
    health = HealthCheckConfig(interval_s=0.2, timeout_s=_LIMIT_S)
    proxy = Proxy(RouterConfig(health=health))
    app = router_app(proxy, [ReplicaAddress(found["inference"].url)], "the-routers-administrator")
    server = _begin(stack, "router", app, "/v1/models")
    end_s = time.monotonic() + _LIMIT_S
    while not all(replica.ready for replica in proxy.router.replicas.values()):
        assert time.monotonic() < end_s, "the replica does not become ready"
        time.sleep(0.02)
    server.names |= found["inference"].names | {"admin": "the-routers-administrator"}
    return server


def _relay(stack: ExitStack, directory: Path, found: dict[str, Server]) -> Server:
    store = directory / "store"
    (store / "commits").mkdir(parents=True)
    (directory / "secret").write_text(SECRET)
    (store / "commits" / "1.json").write_text("{}")
    relay = stack.enter_context(RelayServer(Relay(DirectoryFolder(store), directory / "cache"), token=TOKEN))
    return Server("relay", relay.url, "/list/commits")


def _control(stack: ExitStack, directory: Path, found: dict[str, Server]) -> Server:
    inbox = Inbox(directory / "inbox", SETTINGS.max_result_bytes)
    app = control_app(Control(SETTINGS, OFFER, inbox), TOKEN)
    server = _begin(stack, "control", app, "/v1/run")
    body = {"name": "cluster", "api": 4, "fingerprint": dict(FINGERPRINT.parts)}
    server.names["member"] = _ask(server, "POST", "/v1/join", json=body)["member"]
    return server


_BEGIN: dict[str, Callable[[ExitStack, Path, dict[str, Server]], Server]] = {
    "sandbox": _sandbox,
    "environment": _environment,
    "inference": _inference,
    "recording": _recording,
    "router": _router,
    "relay": _relay,
    "control": _control,
}
