"""Peers of the inference benchmark get equal work, and failures are reported with their reason."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from inference_peers import PEERS, PeerFailedError, Played, Variant, Worker, variants
from inference_work import as_json, longest_tokens, scenarios
from work_protocol import Tokens, Turn, play_with

import inference

_ECHO = """
import sys
sys.path.insert(0, {workers!r})
from work_protocol import serve
serve(lambda settings: lambda sessions: sum(turn.output for turns in sessions for turn in turns))
"""


class CountingBatcher:
    """Answers the youngest request first, with the length of its history as every token."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int, int]] = []
        self.seen: dict[int, list[Tokens]] = {}

    def add(self, session: int, history: Tokens, new: int, output: int) -> None:
        self.waiting.append((session, len(history), output))
        self.seen.setdefault(session, []).append(history[len(history) - new :])

    def wait(self) -> list[tuple[int, Tokens]]:
        session, length, output = self.waiting.pop()
        return [(session, [length] * output)]


def worker_of(tmp_path: Path, source: str) -> Variant:
    script = tmp_path / "worker.py"
    script.write_text(source, encoding="utf-8")
    return Variant("fake", "1 threads", str(script), {"threads": 1})


def echo(tmp_path: Path) -> Variant:
    workers = Path(inference.__file__).parent / "inference_workers"
    return worker_of(tmp_path, _ECHO.format(workers=str(workers)))


def test_a_session_sends_its_next_turn_when_the_last_is_answered() -> None:
    batcher = CountingBatcher()
    sessions = [[Turn([1, 2], 3), Turn([4], 1)], [Turn([5], 2)]]
    assert play_with(batcher, sessions) == 6
    assert batcher.seen == {0: [[1, 2], [4]], 1: [[5]]}


def test_an_answer_of_another_length_is_refused() -> None:
    batcher = CountingBatcher()
    batcher.wait = lambda: [(0, [1])]  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="ended early"):
        play_with(batcher, [[Turn([1], 2)]])


def test_workloads_have_the_shape_that_was_asked_for_and_differ_by_seed() -> None:
    scenario = scenarios(quick=False)["moe"]
    sessions = scenario.sessions(0)
    work = as_json(sessions, scenario.vocab_size, 0)
    assert (len(work), {len(turns) for turns in work}) == (32, {6})
    assert all(200 <= len(turns[0]["input"]) <= 800 for turns in work)  # type: ignore[arg-type]
    assert work != as_json(scenario.sessions(1), scenario.vocab_size, 1)
    assert [s.turns[:2] for s in sessions] == [s.turns for s in scenario.sessions(0, turns=2)]
    lengths = [sum(t.input_tokens + t.output_tokens for t in s.turns) for s in sessions]
    assert max(lengths) < longest_tokens(sessions) <= max(lengths) + 32


def test_every_peer_has_settings_for_the_models_it_takes() -> None:
    found = {
        (peer, name): variants(peer, name, 512, 4) for peer in PEERS for name in ("moe", "dense", "large")
    }
    without = {key for key, settings in found.items() if not settings}
    assert without == {("llama_cpp", "moe"), ("ours_bfloat16", "moe"), ("ours_bfloat16", "dense")}
    for settings in found.values():
        assert len({variant.label for variant in settings}) == len(settings)


def test_a_worker_plays_what_it_is_given_and_ends(tmp_path: Path) -> None:
    workload = tmp_path / "workload.json"
    workload.write_text('[[{"input": [1, 2], "output": 5}], [{"input": [3], "output": 2}]]', encoding="utf-8")
    with Worker(echo(tmp_path), tmp_path, tmp_path / "log") as worker:
        assert worker.play(workload, 60.0).output_tokens == 7
        process = worker._process
    assert process.poll() is not None


def test_a_worker_that_dies_says_why(tmp_path: Path) -> None:
    variant = worker_of(tmp_path, "raise SystemExit('no such model')")
    with pytest.raises(PeerFailedError, match="died: no such model"):
        Worker(variant, tmp_path, tmp_path / "log")


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_after_its_time(tmp_path: Path) -> None:
    with pytest.raises(PeerFailedError, match=r"took more than 2 s"):
        Worker(
            worker_of(tmp_path, "import time; time.sleep(600)"), tmp_path, tmp_path / "log", start_limit_s=2.0
        )
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert str(tmp_path).encode() not in one.read_bytes()


def comparison_of(
    name: str, walls: dict[str, list[float]], slow_turns: int | None = None
) -> inference.PeerComparison:
    comparison = inference.PeerComparison.__new__(inference.PeerComparison)
    comparison._slow_turns = slow_turns
    comparison.results = {
        peer: inference.PeerResult(rounds=[Played(wall, wall / 2, 100) for wall in times])
        for peer, times in walls.items()
    }
    return comparison


def test_headlines_are_the_worse_of_both_small_models_by_paired_rounds() -> None:
    comparisons = {
        "moe": comparison_of("moe", {"ours": [1.0, 2.0, 1.0], "vllm": [3.0, 4.0, 2.0]}),
        "dense": comparison_of("dense", {"ours": [1.0, 1.0, 1.0], "vllm": [1.5, 1.5, 9.0]}),
        "large": comparison_of("large", {"ours": [1.0], "vllm": [0.5]}),
    }
    figures = inference.comparison_figures(comparisons)
    assert figures["moe_tokens_vs_vllm"] == 2.0
    assert figures["dense_tokens_vs_vllm"] == figures["tokens_vs_vllm"] == 1.5
    assert figures["large_tokens_vs_vllm"] == 0.5


def test_slow_peers_are_compared_on_their_own_workload() -> None:
    comparison = comparison_of(
        "moe", {"ours": [10.0], "transformers_generate": [30.0], "llama_cpp": []}, slow_turns=2
    )
    comparison.results["ours"].short_rounds = [Played(3.0, 3.0, 40)]
    assert comparison.ratios("transformers_generate") == (10.0, 5.0)
    assert comparison.ratios("llama_cpp") is None
