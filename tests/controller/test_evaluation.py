import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from etude.controller.evaluation import EvaluationRequest, evaluate
from etude.controller.evaluation_targets import TargetOptions
from etude.errors import ConfigError, InfrastructureError
from etude.evaluation import EvaluationResult, compare_results
from etude.evaluation.results import TRAJECTORIES
from etude.observe.observer import RecordingObserver, SilentObserver
from etude.records import ToolCall
from etude.store import TrajectoryLog
from etude.tasks.harbor import write_harbor
from tests.environment.playing import FAILS, SOLVES, TASK

OPTIONS = TargetOptions(model_name="m", tools="core", settings=("sandbox.backend=unisolated",))


class Model(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint that plays one call a message, and says how often it was asked."""

    def __init__(self, turns: Sequence[Sequence[ToolCall | str]]) -> None:
        super().__init__(("127.0.0.1", 0), Talking)
        self.turns = turns
        self.refuses_after = 1_000
        self.num_asked = 0
        self.tools: list[str] = []
        """Those that it was last offered."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Talking(BaseHTTPRequestHandler):
    """One request to the model."""

    server: Model

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.num_asked += 1
        self.server.tools = [tool["function"]["name"] for tool in body.get("tools", [])]
        if self.server.num_asked > self.server.refuses_after:
            self.send_error(401)
            return
        (call,) = self.server.turns[sum(message["role"] == "assistant" for message in body["messages"])]
        assert isinstance(call, ToolCall)
        arguments = {name: int(v) if v.isdigit() else v for name, v in call.arguments.items()}
        function = {"name": call.name, "arguments": json.dumps(arguments)}
        message = {"content": "", "tool_calls": [{"index": 0, "id": "c", "function": function}]}
        data = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[..., Model]]:
    servers: list[Model] = []

    def start(turns: Sequence[Sequence[ToolCall | str]]) -> Model:
        servers.append(Model(turns))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    for number in range(3):
        metadata = {"repository": f"r{number}"}
        write_harbor(replace(TASK, id=f"t{number}", metadata=metadata), tmp_path / "suite" / f"t{number}")
    return tmp_path / "suite"


def test_a_killed_evaluation_of_an_endpoint_goes_on_where_it_was(
    suite: Path, tmp_path: Path, serve: Callable[..., Model]
) -> None:
    server, observer = serve(SOLVES), RecordingObserver()
    server.refuses_after = 5
    request = EvaluationRequest(server.url, str(suite), max_sessions=1, out=tmp_path / "a", options=OPTIONS)
    with pytest.raises(ConfigError, match="rejected the key"):
        evaluate(request, SilentObserver())
    assert not (tmp_path / "a" / "result.json").exists()
    server.refuses_after = 1_000
    result = evaluate(request, observer)
    assert server.num_asked == 3 * 4 + 2, "one message of the second session was lost, one was refused"
    figures = result.modes["sampled"].figures
    assert (figures["pass_rate"], figures["tasks"], figures["turns"]) == (1.0, 3, 4.0)
    assert [row.cluster for row in result.modes["sampled"].rows] == ["r0", "r1", "r2"]
    assert [step for _, step, _ in observer.advances] == [1, 2, 3]
    assert observer.stages == [(f"evaluation on {suite}", 3)] and observer.unit == "session"
    assert evaluate(request, SilentObserver()) == result == EvaluationResult.read(tmp_path / "a")
    assert server.num_asked == 14
    assert "| solved (pass@1) | 100.0 % (29.2 to 100.0) |" in (tmp_path / "a" / "result.md").read_text()
    with pytest.raises(ConfigError, match="an evaluation that differs in: temperature"):
        evaluate(replace(request, temperature=0.5), SilentObserver())


def test_two_models_are_compared_by_their_results(
    suite: Path, tmp_path: Path, serve: Callable[..., Model]
) -> None:
    results = [
        evaluate(
            EvaluationRequest(serve(turns).url, str(suite), out=tmp_path / name, options=OPTIONS),
            SilentObserver(),
        )
        for name, turns in (("a", FAILS), ("b", SOLVES))
    ]
    compared = compare_results(*results)["sampled"]["pass_rate"]
    assert (compared["first"], compared["second"], compared["better"]) == (0.0, 1.0, 3)
    assert compared["p_value"] == 0.25


def test_what_is_wrong_with_an_endpoint_is_said_before_a_task_is_read(serve) -> None:
    model, nowhere = serve([]), "no such directory"
    for url, options, message in (
        ("http://127.0.0.1:9", OPTIONS, "endpoint: ConnectError"),
        (model.url, replace(OPTIONS, model_name=""), "--model-name: is missing"),
        (model.url, replace(OPTIONS, key_variable="NO_SUCH_KEY"), "--key-variable"),
        (model.url, replace(OPTIONS, tools="read"), "no such tool"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(EvaluationRequest(url, nowhere, options=options), SilentObserver())


def test_an_endpoint_that_drops_its_requests_is_no_result(
    suite: Path, monkeypatch: pytest.MonkeyPatch, serve
) -> None:
    async def at_once(delay: float) -> None:
        """Waits for nothing."""

    monkeypatch.setattr("etude.agent.runner.asyncio.sleep", at_once)
    request = EvaluationRequest(serve([]).url, str(suite), options=OPTIONS)
    with pytest.raises(InfrastructureError, match="3 of 3 sessions failed"):
        evaluate(request, SilentObserver())


def test_a_model_is_measured_with_an_index_that_its_tools_search(tmp_path: Path, serve) -> None:
    write_harbor(TASK, tmp_path / "tasks" / "one")
    search = ToolCall("semantic_search", {"query": "tally"})
    model = serve([[search], [ToolCall("finish")]])
    file = tmp_path / "search.toml"
    file.write_text('name = "another"\n[agent]\nindex = "words"\n')
    asked = {
        "plain": OPTIONS,
        "set": replace(OPTIONS, settings=(*OPTIONS.settings, "agent.index=words")),
        "file": replace(OPTIONS, config=file),
    }
    shown: dict[str, str] = {}
    for name, options in asked.items():
        out, tasks = tmp_path / name, str(tmp_path / "tasks")
        request = EvaluationRequest(model.url, tasks, 1, temperature=0.0, out=out, options=options)
        result = evaluate(request, SilentObserver())
        (stored,) = TrajectoryLog(out / TRAJECTORIES).read()
        shown[name] = stored.members[0].turns[0].results[0].output
        assert ("semantic_search" in model.tools) == (name != "plain")
        assert result.target["label"].endswith("agent.index=words") == (name == "set")
    assert (
        "unknown tool" in shown["plain"]
        and "lib/tally.py" in shown["set"]
        and "lib/tally.py" in shown["file"]
    )
    with pytest.raises(ConfigError, match="only the sections agent, images, sandbox, tasks"):
        evaluate(replace(request, options=replace(OPTIONS, settings=("seed=1",))), SilentObserver())
