"""Tokens per second inside the real RL loop, against a plain PyTorch baseline in the same minute.

    python benchmarks/throughput.py [--config FILE] [--set KEY=VALUE] [--rl-steps N] [--checkpoint DIR]
                                    [--json FILE]

Each block is one step of the real loop (real sandboxes, tools, grading, log and training), then a replay of
the same sessions and the same training batch through `baseline.py`: A B A B, ratios pair by pair. The first
block warms up and is not counted. Without --checkpoint a model is mid-trained first (minutes).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baseline import Baseline, Session, Work
from common import (
    Figures,
    Roofline,
    median_figures,
    median_ratio,
    print_table,
    probe_roofline,
    token_cost,
    write_result,
)
from numpy.typing import NDArray
from torch import Tensor

from etude.agent import open_renderer
from etude.config import AgentConfig, ModelConfig, RunConfig, load_config
from etude.controller.compute import set_threads, use_sampling_threads
from etude.controller.local import LocalHandle
from etude.controller.parts import Parts, open_parts
from etude.controller.reinforcement import LoopTimes, ReinforcementLoop
from etude.controller.stopping import StopSignal
from etude.controller.throughput import Snapshot, throughput_figures
from etude.inference.service import EngineService
from etude.model import LanguageModel
from etude.model.huggingface import load_model, save_model, to_huggingface
from etude.observe import MemorySink, SilentObserver
from etude.protocols import Sampler
from etude.records import Group, PolicyVersion, SampleChunk, SampleRequest, Scores, Segment
from etude.rollout.collect import Collected, GroupCollector
from etude.store.trajectories import TrajectoryLog
from etude.tokens.tokenizer import Tokenizer
from etude.training import NextTokenTrainer, RlTrainer, ShuffledDocuments
from etude.training.batches import split_updates
from etude.training.intake import ModelLimits, prepare_groups
from etude_quickstart.corpus import load_sessions, make_documents, train_corpus_tokenizer
from etude_quickstart.generator import TaskGenerator

STUDY = {"decode_tokens_per_s": 2_100.0, "prefill_tokens_per_s": 7_900.0, "training_tokens_per_s": 6_300.0}
"""In-loop figures of the project's initial feasibility study, on a machine of the same kind."""
MIDTRAIN_STEPS = 400
MAX_GAP = 1e-4
RATES = ("decode", "prefill", "training")


class WaveRecorder:
    """A Sampler that records which sessions ran concurrently and forwards all calls."""

    def __init__(self, sampler: Sampler) -> None:
        self.waves: list[list[str]] = []
        """Session ids; a wave ends when no session is open."""
        self._sampler = sampler
        self._live: set[str] = set()

    def open(self, session_id: str, sibling: str | None = None) -> None:
        if not self._live:
            self.waves.append([])
        self._live.add(session_id)
        self.waves[-1].append(session_id)
        self._sampler.open(session_id)

    def close(self, session_id: str) -> None:
        self._live.discard(session_id)
        self._sampler.close(session_id)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        async for chunk in self._sampler.stream(request):
            yield chunk

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        return await self._sampler.score(tokens, version)

    def abort(self, request_id: str) -> None:
        self._sampler.abort(request_id)


class RecordingCollector(GroupCollector):
    """A collector that stores its last result, for the replay."""

    last: Collected

    async def collect(self) -> Collected:
        """See GroupCollector."""
        self.last = await super().collect()
        return self.last


@dataclass
class Measurements:
    """Measurements of the counted blocks, one entry each."""

    ours: list[Figures] = field(default_factory=list[Figures])
    baseline: list[Figures] = field(default_factory=list[Figures])
    contexts: list[Figures] = field(default_factory=list[Figures])
    gaps: list[Tensor] = field(default_factory=list[Tensor])
    """|log-probability of the baseline - as sampled| of every sampled token."""


class Blocks:
    """Measures a block after each RL step: the step itself, then its replay through the baseline."""

    def __init__(self, config: RunConfig, parts: Parts, trainer: RlTrainer, baseline: Baseline) -> None:
        """Sampling uses the configuration's number of threads, training and baseline the current one."""
        self.done = Measurements()
        self._all_threads = torch.get_num_threads()
        self._config, self._parts, self._trainer, self._baseline = config, parts, trainer, baseline
        self.recorder = WaveRecorder(parts.service)
        source = TaskGenerator(config.seed, "train", level_weights=config.rl.level_weights)
        self.collector = RecordingCollector(
            parts.environment, self.recorder, source.task, config.rl, config.name, config.seed
        )
        self._warm = False

    def attach(self, loop: ReinforcementLoop) -> None:
        """Starts the first block."""
        self._loop = loop
        self._sampled_with = to_huggingface(self._trainer.model)
        self._begin()

    async def __call__(self, step: int) -> None:
        """Ends a block; see AfterStep."""
        wall_s = time.perf_counter() - self._began
        ended = Snapshot.of(self._parts, self._loop)
        figures = throughput_figures(self._counted, ended, self._loop)
        collected = self.collector.last
        replayed, gaps = self._replay(collected)
        if self._warm:
            steps = self._engine_steps() - self._steps
            self.done.ours.append(figures | {"wall_s": wall_s, "engine_steps": float(steps)})
            self.done.baseline.append(replayed)
            self.done.contexts.append(_contexts(collected))
            self.done.gaps.append(gaps)
            print(f"block {len(self.done.ours)}: " + _one_line(figures, replayed), flush=True)
        self._warm = True
        self._sampled_with = to_huggingface(self._trainer.model)
        self._begin()

    def _begin(self) -> None:
        use_sampling_threads(self._config)
        self._loop.times = LoopTimes()
        self.recorder.waves = []
        self._counted = Snapshot.of(self._parts, self._loop)
        self._steps = self._engine_steps()
        self._began = time.perf_counter()

    def _engine_steps(self) -> int:
        service = self._parts.service
        assert isinstance(service, EngineService)
        return service.engine.counters.steps

    def _replay(self, collected: Collected) -> tuple[Figures, Tensor]:
        segments = {str(t.id): t.segments[0] for t in collected.trajectories if t.reward is not None}
        waves = [
            [segments[name] for session_id in wave if (name := session_id.rpartition("~")[0]) in segments]
            for wave in self.recorder.waves
        ]
        torch.set_num_threads(self._all_threads)
        self._baseline.load(self._sampled_with)
        rollout, gaps = replay_waves(self._baseline, waves, self._config.engine.tool_delay_steps)
        updates, num_tokens = _updates(collected.trained, self._config)
        if not num_tokens:
            raise SystemExit("no group had both passes and failures: give a trained --checkpoint")
        began = time.perf_counter()
        self._baseline.train_step(updates)
        return rollout | {"training_tokens_per_s": num_tokens / (time.perf_counter() - began)}, gaps


def replay_waves(
    baseline: Baseline, waves: Sequence[Sequence[Segment]], delay_steps: int
) -> tuple[Figures, Tensor]:
    """(rates of the baseline over the recorded waves, log-probability gap of each sampled token)."""
    prefill, decode = Work(), Work()
    gaps: list[Tensor] = []
    for wave in waves:
        sessions = [Session(torch.tensor(s.tokens, dtype=torch.long), _messages(s)) for s in wave]
        baseline.replay(sessions, delay_steps, prefill, decode)
        for session, segment in zip(sessions, wave, strict=True):
            gap = session.logprobs - torch.tensor(segment.logprobs)
            gaps.append(gap.abs()[torch.tensor(segment.sampled)])
    figures = {
        "decode_tokens_per_s": decode.tokens / decode.seconds,
        "prefill_tokens_per_s": prefill.tokens / prefill.seconds,
        "engine_tokens_per_s": (decode.tokens + prefill.tokens) / (decode.seconds + prefill.seconds),
        "decode_tokens": float(decode.tokens),
        "prefill_tokens": float(prefill.tokens),
    }
    return figures, torch.cat(gaps)


def _messages(segment: Segment) -> list[tuple[int, int]]:
    spans = sorted((s.start, s.end) for s in segment.turn_spans if s.role == "assistant")
    return [span for span in spans if span[1] > span[0]]


def _updates(groups: Sequence[Group], config: RunConfig) -> tuple[list[list[dict[str, Tensor]]], int]:
    """(the trainer's data in the baseline's format, its number of tokens)."""
    rl = config.rl.model_copy(update={"router_replay": "off"})
    limits = ModelLimits(config.tokenizer.vocab_size, config.model.max_positions)
    version = PolicyVersion(config.name, 0)
    prepared, _ = prepare_groups(groups, rl, limits, version, lambda ref: np.zeros(0))
    updates = [
        [
            {
                "tokens": torch.tensor(s.tokens, dtype=torch.long),
                "sampled": torch.tensor(s.sampled),
                "logprobs": torch.tensor(s.logprobs),
                "advantages": torch.from_numpy(s.advantages),
            }
            for s in update
            if s.has_advantage
        ]
        for update in split_updates(prepared, rl.loss, rl.updates_per_step)
    ]
    updates = [update for update in updates if update]
    return updates, sum(len(sequence["tokens"]) for update in updates for sequence in update)


def _contexts(collected: Collected) -> Figures:
    """Mean context of decoded, prefilled and trained tokens, and the share of trained tokens with logits."""
    decoded, prefilled, trained, sampled = [], [], [], 0
    segments = [t.segments[0] for t in collected.trajectories if t.reward is not None]
    for segment in segments:
        computed = 0
        for first, end in _messages(segment):
            prefilled.append(np.arange(computed, first) + 1)
            decoded.append(np.arange(first, end - 1) + 1)
            computed = end - 1
    for segment in (t.segments[0] for group in collected.trained for t in group.members if t.reward):
        trained.append(np.arange(len(segment.tokens)) + 1)
        sampled += segment.num_sampled_tokens
    return {
        "decode": float(np.concatenate(decoded).mean()),
        "prefill": float(np.concatenate(prefilled).mean()),
        "training": float(np.concatenate(trained).mean()),
        "logits_share": sampled / sum(len(rows) for rows in trained),
    }


def _one_line(ours: Figures, theirs: Figures) -> str:
    return ", ".join(
        f"{name} {ours[key]:,.0f} against {theirs[key]:,.0f} tokens/s"
        for name, key in ((name, f"{name}_tokens_per_s") for name in RATES)
    )


# ---- results -----------------------------------------------------------------------------


def summarise(done: Measurements, roofline: Roofline, model: ModelConfig, vocab_size: int) -> Figures:
    """The figures of all blocks: medians, ratios pair by pair, shares of the roofline, time budget."""
    ours, contexts = median_figures(done.ours), median_figures(done.contexts)
    names = (*RATES, "engine")
    figures = {f"{name}_tokens_per_s": ours[f"{name}_tokens_per_s"] for name in names}
    for name in names:
        key = f"{name}_tokens_per_s"
        figures[f"{name}_vs_baseline"] = median_ratio(
            [b[key] for b in done.ours], [b[key] for b in done.baseline]
        )
    figures |= {
        "matmul_gflops": roofline.matmul_gflops,
        "model_matmul_gflops": roofline.model_matmul_gflops,
        "copy_gb_per_s": roofline.copy_gb_per_s,
    }
    for name, limit_s in limits_s(ours, contexts, roofline, model, vocab_size).items():
        figures[f"{name}_roofline_share"] = figures[f"{name}_tokens_per_s"] * limit_s
    gaps = torch.cat(done.gaps)
    figures["logprob_gap_p999"] = float(gaps.kthvalue(max(1, round(0.999 * len(gaps)))).values)
    figures["logprob_gap_max"] = float(gaps.max())
    return figures | median_figures([_budget(block) for block in done.ours])


def limits_s(
    ours: Figures, contexts: Figures, roofline: Roofline, model: ModelConfig, vocab_size: int
) -> Figures:
    """Lower bounds of seconds per token by arithmetic and memory traffic: see `docs/performance.md`."""
    decode = token_cost(model, vocab_size, contexts["decode"])
    rows = ours["decode_tokens"] / ours["engine_steps"]
    decode_bytes = decode.kv_read_bytes + decode.kv_write_bytes + decode.weight_bytes / rows
    prefill = token_cost(model, vocab_size, contexts["prefill"], with_head=False)
    training = token_cost(model, vocab_size, contexts["training"], with_head=False)
    head_flops = 2.0 * vocab_size * model.hidden_size * contexts["logits_share"]
    return {
        "decode": roofline.seconds(decode.forward_flops, decode_bytes),
        "prefill": roofline.seconds(prefill.forward_flops, prefill.kv_write_bytes),
        "training": roofline.seconds(3 * (training.forward_flops + head_flops), 0.0),
    }


def _budget(block: Figures) -> Figures:
    """Wall seconds of one RL step by activity."""
    environment_s = block["rollout_s"] - block["engine_s"] - block["waiting_for_tools_s"]
    parts = {
        "budget_engine_s": block["engine_s"],
        "budget_waiting_for_tools_s": block["waiting_for_tools_s"],
        "budget_environment_s": environment_s,
        "budget_training_s": block["train_s"],
        "budget_publish_s": block["publish_s"],
    }
    return parts | {"budget_other_s": block["wall_s"] - sum(parts.values()), "budget_step_s": block["wall_s"]}


# ---- the run ------------------------------------------------------------------------------------


async def measure(config: RunConfig, checkpoint: Path, num_steps: int) -> Measurements:
    """Runs `num_steps` counted blocks from a checkpoint with its tokenizer."""
    tokenizer, model = Tokenizer.load(checkpoint), load_model(checkpoint)
    described = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as directory, StopSignal(SilentObserver()) as stop:
        async with open_parts(config, tokenizer, model) as parts:
            trainer = RlTrainer(model, config.rl, config.name, parts.weights, parts.blobs.get)
            blocks = Blocks(config, parts, trainer, Baseline(described, to_huggingface(model)))
            loop = ReinforcementLoop(
                LocalHandle(trainer, torch.get_num_threads()),
                parts.service,
                blocks.collector,
                TrajectoryLog(Path(directory)),
                parts.blobs,
                MemorySink(),
                SilentObserver(),
                stop,
            )
            blocks.attach(loop)
            await loop.run(num_steps + 1, blocks)
            return blocks.done


def midtrain(config: RunConfig, directory: Path) -> None:
    """Mid-trains a model for `config.midtrain.num_steps` and saves it with its tokenizer."""
    sessions = load_sessions(config.midtrain.num_sessions, SilentObserver())
    tokenizer = train_corpus_tokenizer(sessions, config.tokenizer.vocab_size)
    renderer = open_renderer(tokenizer, AgentConfig())
    documents = make_documents(sessions, [], renderer, config.midtrain, config.agent.max_tokens)
    model = LanguageModel(config.model, tokenizer.vocab_size)
    model.initialise(config.seed)
    trainer = NextTokenTrainer(
        model, ShuffledDocuments(documents, config.midtrain.tokens_per_step, config.seed), config.midtrain
    )
    for _ in range(config.midtrain.num_steps):
        trainer.step()
    save_model(model, directory)
    tokenizer.save(directory)


def run(config: RunConfig, checkpoint: Path, num_steps: int) -> tuple[Figures, dict[str, Any]]:
    """Measures: (figures, peers). Raises SystemExit if the baseline's results differ from ours."""
    model = load_model(checkpoint)
    config = config.model_copy(update={"model": model.config})
    threads = set_threads(config.num_threads)
    print(f"{threads} compute threads, {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    before = probe_roofline(model.config, model.vocab_size)
    done = asyncio.run(measure(config, checkpoint, num_steps))
    after = probe_roofline(model.config, model.vocab_size)
    roofline = Roofline(*(max(a, b) for a, b in zip(_values(before), _values(after), strict=True)))
    figures = summarise(done, roofline, model.config, model.vocab_size)
    if figures["logprob_gap_p999"] > MAX_GAP:
        raise SystemExit(
            f"baseline and engine compute different things: gap {figures['logprob_gap_p999']:.2g}"
        )
    return figures, {"baseline": median_figures(done.baseline), "feasibility study": STUDY}


def _values(roofline: Roofline) -> tuple[float, float, float]:
    return roofline.matmul_gflops, roofline.model_matmul_gflops, roofline.copy_gb_per_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rl-steps", type=int, default=6)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.set)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = arguments.checkpoint or Path(directory)
        if arguments.checkpoint is None:
            steps = config.midtrain.model_copy(update={"num_steps": MIDTRAIN_STEPS})
            midtrain(config.model_copy(update={"midtrain": steps}), checkpoint)
        figures, peers = run(config, checkpoint, arguments.rl_steps)
    print_table("median of the blocks", figures)
    print_table("baseline", peers["baseline"])
    if arguments.json:
        write_result(arguments.json, figures, peers)


if __name__ == "__main__":
    main()
