"""Claim: the agent harness adds almost no time to that of the model and the tools.

    python benchmarks/agent.py --json out.json [--summaries runs/summaries]

- `call_overhead_ms`: median time to parse, dispatch and render one call, over whole sessions on an in-memory
  sandbox that answers at once, so that only the harness's own time remains.
- `parallel_read_8_vs_1`: time of a turn with eight reads over that of a turn with one, in a real local
  sandbox, pair by pair.
- `sessions_held`: number of concurrent sessions in real local sandboxes, each with a call every ten seconds,
  for a minute; `held_p99_ms`: 99th percentile of a whole call, from the message's last token to the rendered
  result.
- `summary_task_pass_with`, `..._without`, `tokens_over_window`: the model of a run (`etude train --config
  configs/summaries.toml`) on trails of hundreds of files, with context summaries and without.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from random import Random

from common import Figures, median_ratio, print_table, write_result
from tests.fakes.scripted import ScriptedSampler, Tokens
from tests.fakes.scripted import play as play_messages

from etude.agent import AgentSession, LocalWorkspace, SessionLimits, ToolContext, core_registry, run_session
from etude.records import SampleChunk, SampleRequest, ToolCall, TrajectoryId
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Template
from etude.tokens import ETUDE_TEMPLATE, Renderer, train_tokenizer
from etude.tokens.grammar import XmlGrammar
from etude_quickstart.memory_backend import MemoryBackend

FILES = {f"src/module_{number}.py": f"VALUE = {number}\n" * 40 for number in range(8)}
LIMITS = SessionLimits(max_turns=1 << 20, max_calls_per_turn=8, max_tokens=1 << 20, max_message_tokens=1024)
INTERVAL_S = 10.0
READS = [ToolCall("read_file", {"path": path}) for path in FILES]


def make_renderer() -> Renderer:
    """A renderer with a tokenizer of a few merges, which hardly changes the harness's cost."""
    grammar = XmlGrammar(core_registry().schemas)
    controls = [*ETUDE_TEMPLATE.control_tokens, *grammar.control_tokens()]
    return Renderer(train_tokenizer([*FILES.values(), *FILES] * 4, 600, controls), grammar)


class TimedSampler(ScriptedSampler):
    """Plays given messages and times each turn: from its last token to the request for the next message."""

    def __init__(self, messages: Iterable[Tokens], pauses_s: Iterator[float] | None = None) -> None:
        super().__init__(play_messages(messages))
        self._pauses_s = pauses_s
        self._sent_s = 0.0
        self.turn_s: list[float] = []

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream."""
        if self._sent_s:
            self.turn_s.append(time.perf_counter() - self._sent_s)
        if self._pauses_s is not None:
            await asyncio.sleep(next(self._pauses_s))
        async for chunk in super().stream(request):
            self._sent_s = time.perf_counter()
            yield chunk


async def play(sampler: TimedSampler, renderer: Renderer, backend: SandboxBackend, name: str) -> list[float]:
    """Plays a session; returns the seconds of each turn: parse the message, run its calls, render results."""
    sandbox = await backend.create(Template(FILES))
    try:
        session = AgentSession("read", renderer, TrajectoryId("bench", name, 0, 0, 0), LIMITS)
        workspace = LocalWorkspace(ToolContext(sandbox, core_registry()))
        await run_session(session, sampler, workspace, name, (0,))
        return sampler.turn_s
    finally:
        await sandbox.kill()


def messages_of(renderer: Renderer, turns: Iterable[list[ToolCall]]) -> Iterator[Tokens]:
    """One message for each turn, and one that finishes."""
    for calls in turns:
        yield renderer.message(calls)
    yield renderer.message([ToolCall("finish")])


async def measure_overhead(renderer: Renderer, turns: int = 400) -> Figures:
    """Milliseconds per call in sessions with one call per turn, on the in-memory sandbox."""
    messages = messages_of(renderer, ([READS[number % 8]] for number in range(turns)))
    times = await play(TimedSampler(messages), renderer, MemoryBackend(), "overhead")
    return {
        "call_overhead_ms": 1e3 * statistics.median(times),
        "call_overhead_p99_ms": 1e3 * statistics.quantiles(times, n=100)[-1],
    }


async def measure_parallel(renderer: Renderer, pairs: int = 100) -> Figures:
    """Time of eight reads in one turn over that of one read, in a local sandbox."""
    backend = open_backend("local")
    try:
        turns = (calls for _ in range(pairs) for calls in (READS[:1], READS))
        times = (await play(TimedSampler(messages_of(renderer, turns)), renderer, backend, "reads"))[4:]
        one, eight = times[0::2], times[1::2]
        return {
            "read_1_ms": 1e3 * statistics.median(one),
            "read_8_ms": 1e3 * statistics.median(eight),
            "parallel_read_8_vs_1": median_ratio(eight, one),
        }
    finally:
        await backend.close()


async def measure_held(renderer: Renderer, sessions: int = 500, seconds: float = 60.0) -> Figures:
    """Call latencies of `sessions` concurrent sessions. Raises what any of them raises."""
    backend = open_backend("local")
    try:
        calls = int(seconds / INTERVAL_S)

        def sampler(number: int) -> TimedSampler:
            phase_s = Random(number).uniform(0, INTERVAL_S)
            turns = ([READS[(number + turn) % 8]] for turn in range(calls))
            return TimedSampler(messages_of(renderer, turns), chain([phase_s], repeat(INTERVAL_S)))

        runs = await asyncio.gather(
            *(play(sampler(number), renderer, backend, f"held-{number}") for number in range(sessions))
        )
        times = [turn_s for run in runs for turn_s in run]
        percentiles = statistics.quantiles(times, n=1000)
        return {
            "sessions_held": float(len(runs)),
            "held_calls": float(len(times)),
            "held_p50_ms": 1e3 * statistics.median(times),
            "held_p99_ms": 1e3 * percentiles[989],
            "held_p999_ms": 1e3 * percentiles[998],
        }
    finally:
        await backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--summaries", type=Path, help="run directory of configs/summaries.toml")
    parser.add_argument("--sessions", type=int, default=500)
    arguments = parser.parse_args()
    renderer = make_renderer()
    figures = asyncio.run(measure_overhead(renderer))
    figures |= asyncio.run(measure_parallel(renderer))
    figures |= asyncio.run(measure_held(renderer, arguments.sessions))
    if arguments.summaries:
        # Heavy: the engine comes with it.
        from agent_summaries import measure_summaries

        figures |= measure_summaries(arguments.summaries)
    print_table("agent", figures)
    if arguments.json:
        write_result(arguments.json, figures, {})


if __name__ == "__main__":
    main()
