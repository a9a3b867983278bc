"""Claim: the recording endpoint is cheap, and records an unmodified agent's session as one token sequence.

    python benchmarks/recording.py --json out.json [--harness PYTHON]

A session of 200 turns with a sampler that answers at once: time to match a request's history to the recorded
session, and time of a whole HTTP request beyond that, at the start and at the end. `--harness`: a Python with
mini-swe-agent (2.x); the unmodified agent then plays a scripted session through OpenAI's and through
Anthropic's API, in a directory of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from tests.fakes.scripted import ScriptedSampler

from etude.environment.recording import (
    MapLimits,
    RecordingLimits,
    Recordings,
    RendererCache,
    SamplingDefaults,
    SessionMap,
)
from etude.environment.recording.server import build_app
from etude.observe import commit, describe_machine, versions
from etude.store.trajectories import TrajectoryLog
from etude.tokens import QWEN3_TEMPLATE, Tokenizer, train_tokenizer
from etude.tokens.chat.messages import Opening
from etude.tokens.chat.openai_chat import read_chat, read_tools
from etude.tokens.grammar import HermesGrammar

TOKEN = "benchmark"
NUM_TURNS = 200
REPETITIONS = 5
OUTPUT = "lib/tally.py:12:    total = total + x  # adds what is above a\n" * 12
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
COMMANDS = [
    "printf 'def tally(xs):\\n    return sum(xs)\\n' > tally.py",
    "python3 -c 'import tally; print(tally.tally([1, 2]))'",
    "false",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat tally.py",
]
AGENT = """
import json, sys
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
import minisweagent
model = LitellmModel(model_name=sys.argv[1], cost_tracking="ignore_errors",
                     model_kwargs=json.loads(sys.argv[2]))
agent = DefaultAgent(model, LocalEnvironment(cwd=sys.argv[3]), system_template="You fix code.",
                     instance_template="{{task}}", step_limit=20)
done = agent.run("Write tally.py.")
print(json.dumps({"exit": done.get("exit_status"), "version": minisweagent.__version__}))
"""


def make_renderers() -> RendererCache:
    """A tokenizer trained on this benchmark's texts, with Qwen3's control tokens."""
    tokenizer: Tokenizer = train_tokenizer([OUTPUT] * 4, 400, ["<|im_start|>", "<|im_end|>", *MARKS])
    return RendererCache(tokenizer, HermesGrammar, QWEN3_TEMPLATE)


def answer_text(command: str) -> str:
    """An answer with reasoning and one call."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<think>\nnext step\n</think>\n\nI run it.\n<tool_call>\n{call}\n</tool_call>"


def make_sampler(renderers: RendererCache, texts: Iterator[str]) -> ScriptedSampler:
    """A sampler that answers at once with the next text."""
    renderer = renderers.find(Opening(tools=read_tools([TOOL])))

    def script(session_id: str, context: Any) -> Any:
        return renderer.encode([*renderer.grammar.split(next(texts)), renderer.template.end])

    return ScriptedSampler(script, chunk_tokens=16)


def body(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The body of a chat request."""
    return {"model": "m", "messages": messages, "tools": [TOOL]}


def start() -> list[dict[str, Any]]:
    """The first messages of the session."""
    return [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "Write tally.py."}]


@contextmanager
def serving(recordings: Recordings) -> Iterator[str]:
    """Serves the endpoint on a free loopback port, in a thread; yields its address."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # with this protocol asyncio sets TCP_NODELAY
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(recordings), log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    end_s = time.monotonic() + 30
    while not server.started:
        if time.monotonic() > end_s:
            raise TimeoutError("the server did not start")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()


def measure(store: Path) -> dict[str, float]:
    """One session of NUM_TURNS turns: milliseconds per request, and per match of its history."""
    renderers = make_renderers()
    limits = RecordingLimits(session=MapLimits(max_context_tokens=1 << 20, max_session_tokens=1 << 22))
    sampler = make_sampler(renderers, iter(answer_text(f"sed -n {n}p a.py") for n in range(NUM_TURNS + 1)))
    recordings = Recordings(sampler, renderers, store, {TOKEN: "local"}, limits)
    request_ms: list[float] = []
    with serving(recordings) as url, httpx.Client(timeout=60) as client:
        spec = {"task": "t"}
        headers = {"authorization": f"Bearer {TOKEN}"}
        session = client.post(f"{url}/sessions", json=spec, headers=headers).json()
        history, data = start(), b""
        for _ in range(NUM_TURNS):
            data = json.dumps(body(history)).encode()
            began = time.perf_counter()
            answer = client.post(f"{session['openai_base_url']}/chat/completions", content=data)
            request_ms.append((time.perf_counter() - began) * 1e3)
            message = answer.raise_for_status().json()["choices"][0]["message"]
            call = message["tool_calls"][0]
            history += [message, {"role": "tool", "tool_call_id": call["id"], "content": OUTPUT}]
        (live,) = recordings._sessions.values()
        parse_ms, place_ms = place_times(live.map, history)
        figures = {
            "request_ms_first_20": statistics.median(request_ms[:20]),
            "request_ms_last_20": statistics.median(request_ms[-20:]),
            "read_request_ms_at_end": parse_ms,
            "find_place_ms_at_end": place_ms,
            "context_tokens_at_end": float(live.map.num_tokens),
            "body_bytes_at_end": float(len(data)),
        }
        began = time.perf_counter()
        url = f"{url}/sessions/{session['id']}/finish"
        stored = client.post(url, json={"reward": 1.0}, headers=headers).raise_for_status().json()
        figures["finish_ms"] = (time.perf_counter() - began) * 1e3
        figures["segments"] = float(stored["segments"])
    return figures


def place_times(session_map: SessionMap, history: list[dict[str, Any]]) -> tuple[float, float]:
    """Milliseconds to (parse a request's history, match it to the session)."""
    data = json.dumps(body(history))
    reads: list[float] = []
    places: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        request = read_chat(json.loads(data), strict=False)
        read = time.perf_counter()
        session_map.measure(request.messages, SamplingDefaults().params(request.sampling))
        places.append((time.perf_counter() - read) * 1e3)
        reads.append((read - began) * 1e3)
    return statistics.median(reads), statistics.median(places)


def play_harness(python: str, api: str) -> dict[str, Any]:
    """Plays the scripted session with mini-swe-agent through one API."""
    renderers = make_renderers()
    with tempfile.TemporaryDirectory() as directory:
        work, store = Path(directory) / "work", Path(directory) / "store"
        work.mkdir()
        recordings = Recordings(
            make_sampler(renderers, iter(answer_text(command) for command in COMMANDS)),
            renderers,
            store,
            {TOKEN: "local"},
        )
        with serving(recordings) as url, httpx.Client(timeout=60) as client:
            headers = {"authorization": f"Bearer {TOKEN}"}
            session = client.post(f"{url}/sessions", json={"task": api}, headers=headers).json()
            base = session[f"{api}_base_url"]
            options = {"api_base": base, "api_key": "unused", "drop_params": True}
            names = {"MSWEA_GLOBAL_CONFIG_DIR": directory, "MSWEA_SILENT_STARTUP": "1", "HOME": directory}
            names["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
            command = [python, "-c", AGENT, f"{api}/etude", json.dumps(options), str(work)]
            done = subprocess.run(
                command, env={**os.environ, **names}, capture_output=True, text=True, timeout=120
            )
            if done.returncode:
                raise RuntimeError(f"the harness failed: {done.stderr[-2000:]}")
            stored = client.post(
                f"{url}/sessions/{session['id']}/finish", json={"reward": 1.0}, headers=headers
            ).json()
        (group,) = TrajectoryLog(store).read()
        trajectory = group.members[0]
        expected = sum(len(turn_tokens(renderers, command)) for command in COMMANDS)
        agent = json.loads(done.stdout.strip().splitlines()[-1])
        return {
            **agent,
            "turns": len(trajectory.turns),
            "segments": stored["segments"],
            "sampled_tokens": stored["sampled_tokens"],
            "expected_tokens": expected,
            "tally_written": (work / "tally.py").is_file(),
        }


def turn_tokens(renderers: RendererCache, command: str) -> Any:
    """The tokens that the scripted sampler samples for one command."""
    renderer = renderers.find(Opening(tools=read_tools([TOOL])))
    return renderer.encode([*renderer.grammar.split(answer_text(command)), renderer.template.end])


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--harness", help="a Python with mini-swe-agent installed")
    options = parser.parse_args()
    blocks: list[dict[str, float]] = []
    for _ in range(REPETITIONS):
        with tempfile.TemporaryDirectory() as directory:
            blocks.append(measure(Path(directory)))
    figures = {name: statistics.median(block[name] for block in blocks) for name in blocks[0]}
    harness = (
        {api: play_harness(options.harness, api) for api in ("openai", "anthropic")}
        if options.harness
        else {}
    )
    for name, value in figures.items():
        print(f"  {name:28s} {value:12,.2f}")
    for api, row in harness.items():
        print(f"  mini-swe-agent over {api}: {row}")
    if options.json:
        facts = {"machine": describe_machine(), "versions": versions(), "commit": commit()}
        result = {"figures": figures, "harness": harness, **facts}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
