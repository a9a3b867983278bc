"""Speed-up by speculative drafts: tokens per second of one session with and without them.

    python benchmarks/drafts.py CHECKPOINT --text FILE ... [--json FILE]

CHECKPOINT has layers for multi-token prediction (`etude pretrain --set pretrain.drafts.num_layers=2`).
Prompts are cut from FILEs, which should not be part of its training data. Every drafting mode plays the same
prompts with the same noise, one after the other in each round; native kernels must sample the same tokens. A
mode named `always` drafts unconditionally; in the others the engine measures whether drafts pay. Seconds are
processor time of the thread, so that a busy machine matters less; a ratio is the median over rounds.
`--untrained` shuffles the prompts and randomises the draft layers: the worst case.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import median_ratio, write_result
from numpy.typing import NDArray

from etude.inference import Answer, Engine, MtpDrafts, NgramLookup, choose_drafts
from etude.inference.engine import Kernels
from etude.model import DraftLayers, LanguageModel
from etude.model.huggingface import load_model
from etude.records import PolicyVersion, SampleRequest, SamplingParams
from etude.tokens.tokenizer import Tokenizer

VERSION = PolicyVersion("drafts", 0)
Drafts = NgramLookup | MtpDrafts | None


@dataclass
class Row:
    """Results of one drafting mode at one temperature."""

    kernels: str
    temperature: float
    drafts: str
    tokens_per_s: float
    ratio: float
    """Tokens per second over those without drafts."""
    tokens_per_step: float
    accepted: float
    """Share of drafted tokens that were accepted; 0 without drafts."""


def main() -> None:
    arguments = parse()
    tokenizer, model = Tokenizer.load(arguments.checkpoint), load_model(arguments.checkpoint)
    text = b"".join(path.read_bytes() for path in arguments.text)
    tokens = np.array(tokenizer.encode(text), dtype=np.int32)
    starts = np.linspace(0, len(tokens) - arguments.prompt - 1, arguments.prompts).astype(int)
    prompts = [tokens[start : start + arguments.prompt] for start in starts]
    if arguments.untrained:
        source = np.random.default_rng(0)
        prompts = [source.permutation(prompt).astype(np.int32) for prompt in prompts]
    rows = [
        row
        for kernels in arguments.kernels
        for temperature in arguments.temperatures
        for row in measure(model, arguments, prompts, kernels, temperature)
    ]
    print(f"{'kernels':8} temperature {'drafts':14} tokens/s  ratio  tokens per step  stood")
    for row in rows:
        print(
            f"{row.kernels:8} {row.temperature:11.1f} {row.drafts:14} {row.tokens_per_s:8.0f}"
            f" {row.ratio:6.2f} {row.tokens_per_step:16.2f} {row.accepted:6.0%}"
        )
    if arguments.json is not None:
        names = (f"{row.kernels}_{row.temperature:g}_{row.drafts.replace(' ', '')}" for row in rows)
        figures = {name: row.ratio for name, row in zip(names, rows, strict=True)}
        write_result(arguments.json, figures, {"rows": [asdict(row) for row in rows]})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=192, help="tokens sampled after it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", nargs="+", default=["native", "eager"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--untrained", action="store_true", help="random draft layers and prompts")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(
    model: LanguageModel,
    arguments: argparse.Namespace,
    prompts: list[NDArray[np.int32]],
    kernels: Kernels,
    temperature: float,
) -> list[Row]:
    """Measures all drafting modes, in turn in each round; the first round is not counted."""
    ways: dict[str, Drafts] = {"none": None}
    for kind, most in (("ngram", 4), ("mtp", 1), ("mtp", 2)):
        drafts = choose_drafts(kind, most, arguments.checkpoint)
        assert drafts is not None
        if arguments.untrained and isinstance(drafts, MtpDrafts):
            randomise(drafts.layers)
        ways[f"{kind} {most}"] = drafts
        ways[f"{kind} {most} always"] = replace(drafts, adaptive=False)
    longest = arguments.prompt + arguments.output + 1
    engines = {name: make_engine(model, kernels, longest, drafts) for name, drafts in ways.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, float] = {}
    for number in range(arguments.rounds + 1):
        said: list[list[list[int]]] = []
        for name, engine in engines.items():
            before = engine.counters.steps
            took_s, tokens = play(engine, prompts, arguments.output, temperature, number)
            said.append(tokens)
            if number:
                rates[name].append(len(prompts) * arguments.output / took_s)
                steps[name] = len(prompts) * arguments.output / (engine.counters.steps - before)
        if kernels == "native" and any(tokens != said[0] for tokens in said):
            raise SystemExit("drafts have changed what is sampled")
    return [
        Row(
            kernels,
            temperature,
            name,
            statistics.median(rates[name]),
            median_ratio(rates[name], rates["none"]),
            steps[name],
            engine.counters.accepted_tokens / max(1, engine.counters.drafted_tokens),
        )
        for name, engine in engines.items()
    ]


@torch.no_grad()
def randomise(layers: DraftLayers) -> None:
    """Replaces the values of all matrices by random ones of the same scale."""
    generator = torch.Generator().manual_seed(0)
    for parameter in layers.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, float(parameter.std()), generator=generator)


def make_engine(model: LanguageModel, kernels: Kernels, max_tokens: int, drafts: Drafts) -> Engine:
    """An engine for one session, on one thread."""
    engine = Engine(model.config, model.vocab_size, 1, max_tokens, kernels=kernels, drafts=drafts)
    engine.stage(VERSION, {name: one.detach() for name, one in model.named_parameters()})
    engine.activate(VERSION)
    return engine


def play(
    engine: Engine, prompts: list[NDArray[np.int32]], output: int, temperature: float, round_number: int
) -> tuple[float, list[list[int]]]:
    """(seconds from first to last sampled token, summed over prompts; sampled tokens of each prompt)."""
    took_s, said = 0.0, list[list[int]]()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=output, temperature=temperature)
        name = f"{round_number}.{number}"
        engine.submit(SampleRequest(name, name, prompt, params, frozenset(), (number,)))
        engine.step()  # the prompt, and the first token
        began = time.thread_time()
        answers: list[Answer] = []
        while engine.has_work:
            answers += engine.step(64)
        took_s += time.thread_time() - began
        said.append([int(token) for answer in answers for chunk in answer.chunks for token in chunk.tokens])
        engine.close(name)
    return took_s, said


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
