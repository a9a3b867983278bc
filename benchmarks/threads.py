"""Speed of mid-training with the number of threads that it chooses, against other numbers and the roofline.

    python benchmarks/threads.py [--config configs/quickstart.toml] [--json FILE] [--rounds 5] [--seconds 60]

Each round starts a new stage and lets it choose (`ThreadChoice`), then trains for a minute with each number
of threads from 1 to all cores, each with its own model and batches. `chosen_vs_best`: speed with the chosen
number over the fastest of the round; medians over rounds.

`training_share_of_matrix_rate`: multiply-adds of the model's products, forward and backward, over the wall
time of whole steps (batches, optimiser and all), over the best single-thread rate of a 1,024-cubed product
within the same minute (PyTorch's or the native one, whichever is faster) times the threads that were chosen.
The target is 0.45, or 0.8 of the rate of the model's own shapes by themselves, if that is less. Wall time
depends on other load on the cores; `share_by_processor_time` is the same over processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from common import Figures, print_table, write_result

from etude.agent import open_renderer
from etude.config import AgentConfig, MidtrainConfig, ModelConfig, RunConfig, load_config
from etude.controller.compute import keep_freed_memory, set_threads
from etude.controller.families import open_family
from etude.controller.thread_choice import ThreadChoice
from etude.model import LanguageModel
from etude.model.kernels.native import training
from etude.observe import commit
from etude.observe.observer import SilentObserver
from etude.training import Document, NextTokenTrainer, ShuffledDocuments

_SCALE = 20
"""Factor by which the corpus is smaller than the configuration's, with documents of equal length."""
_WARM_STEPS = 2
_MATRIX_S = 1.0
"""Duration for which products of one shape are repeated."""
_BATCH_TOKENS = 768
WANTED_SHARE, WANTED_OF_ROOFLINE = 0.45, 0.8
Shape = tuple[int, int, int]


class Stage:
    """A mid-training stage that counts the multiply-adds of its matrix products."""

    def __init__(self, config: RunConfig, documents: Sequence[Document], vocab_size: int, seed: int) -> None:
        self.model = LanguageModel(config.model, vocab_size)
        self.model.initialise(seed)
        self._batches = ShuffledDocuments(documents, config.midtrain.tokens_per_step, seed)
        self._trainer = NextTokenTrainer(self.model, self._batches, config.midtrain)
        self._config, self._vocab_size = config.model, vocab_size
        self.products = 0.0
        draw = self._batches.draw

        def draw_and_count() -> list[Document]:
            drawn = draw()
            self.products += sum(count_products(self._config, self._vocab_size, one) for one in drawn)
            return drawn

        self._batches.draw = draw_and_count

    def step(self) -> Mapping[str, float]:
        """One optimiser step."""
        return self._trainer.step()

    def train(self, seconds: float) -> tuple[float, float, float]:
        """Trains for `seconds`; returns (tokens per second, multiply-adds per second, multiply-adds per
        second of processor time)."""
        for _ in range(_WARM_STEPS):
            self.step()
        self.products, tokens = 0.0, 0.0
        began, processor = time.perf_counter(), time.process_time()
        while (wall_s := time.perf_counter() - began) < seconds:
            tokens += self.step()["tokens"]
        return tokens / wall_s, self.products / wall_s, self.products / (time.process_time() - processor)


def count_products(config: ModelConfig, vocab_size: int, document: Document) -> float:
    """Multiply-adds of a document's matrix products, including attention, forward and twice as many backward.
    After the last attention only rows that predict a weighted token are computed."""
    length, wanted = len(document.tokens), int((document.weights[1:] > 0).sum())
    width, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    inwards = width * (heads + 2 * kv_heads) * config.head_dim
    experts = width * config.num_experts + config.experts_per_token * 3 * width * config.expert_size
    outwards = heads * config.head_dim * width + experts
    scores = heads * config.head_dim * length * (length + 1)  # two products with half of the pairs
    inner = (config.num_layers - 1) * length * outwards + wanted * outwards
    return 3.0 * (config.num_layers * (length * inwards + scores) + inner + wanted * width * vocab_size)


def measure_product(shape: Shape, seconds: float = _MATRIX_S) -> float:
    """Multiply-adds per second of one product on one thread: the better of PyTorch's and the native one."""
    rows, depth, columns = shape
    a, b, out = torch.randn(rows, depth), torch.randn(depth, columns), torch.empty(rows, columns)
    ways: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if training.computes(a, b):
        ways.append(lambda: training.multiply(a, b, out))
    for way in ways:
        way()
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds:
        for way in ways:
            start = time.perf_counter()
            way()
            best = min(best, time.perf_counter() - start)
    return rows * depth * columns / best


def own_shapes(config: ModelConfig, vocab_size: int) -> list[Shape]:
    """Shapes of a micro-batch's forward products: those of all layers, with repetitions, and the head's."""
    width, inner, tokens = config.hidden_size, config.expert_size, _BATCH_TOKENS
    rows = max(1, tokens * config.experts_per_token // config.num_experts)
    heads = config.num_heads * config.head_dim
    layer: list[Shape] = [
        (tokens, width, heads + 2 * config.num_kv_heads * config.head_dim),
        (tokens, heads, width),
        *[(rows, width, 2 * inner), (rows, inner, width)] * config.num_experts,
    ]
    return [*layer * config.num_layers, (tokens, width, vocab_size)]


def measure_roofline(config: ModelConfig, vocab_size: int) -> float:
    """Rate of multiplying only the model's own shapes, on one thread."""
    shapes = own_shapes(config, vocab_size)
    rates = {shape: measure_product(shape, _MATRIX_S / 4) for shape in set(shapes)}
    products = [float(np.prod(shape)) for shape in shapes]
    return sum(products) / sum(n / rates[shape] for n, shape in zip(products, shapes, strict=True))


def measure_round(
    config: RunConfig, documents: Sequence[Document], vocab_size: int, seconds: float, number: int
) -> Figures:
    """One choice, and one run with each number of threads, in an order rotated from round to round."""
    cores = set_threads(0)
    stage = Stage(config, documents, vocab_size, number)
    choice = ThreadChoice(config, stage.model, "mid-training", print)
    while not choice.chosen:
        choice.step(stage.step)
    counts = [1 + (number + place) % cores for place in range(cores)]
    speeds: dict[int, float] = {}
    figures: Figures = {"chosen_threads": float(choice.chosen)}
    for count in counts:
        torch.set_num_threads(1)
        rates = [measure_product((1024, 1024, 1024))]
        roofline = measure_roofline(config.model, vocab_size)
        torch.set_num_threads(count)
        speeds[count], products, by_processor = Stage(config, documents, vocab_size, number).train(seconds)
        torch.set_num_threads(1)
        rates.append(measure_product((1024, 1024, 1024)))
        figures[f"tokens_per_s_on_{count}"] = speeds[count]
        if count == choice.chosen:
            figures["matrix_gflops"] = 2e-9 * max(rates)
            figures["own_shapes_gflops"] = 2e-9 * roofline
            figures["training_share_of_matrix_rate"] = products / (max(rates) * count)
            figures["share_by_processor_time"] = by_processor / max(rates)
            figures["wanted_share"] = min(WANTED_SHARE, WANTED_OF_ROOFLINE * roofline / max(rates))
    figures["chosen_vs_best"] = speeds[choice.chosen] / max(speeds.values())
    return figures


def main() -> None:
    """Measures, prints, and writes what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"))
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run on one number of threads")
    options = parser.parse_args()
    if options.json and commit().endswith("-dirty"):
        raise SystemExit("the checkout has changes: commit them, so that the figures name what was measured")
    config = load_config(options.config, ["device=cpu", "num_threads=0"])
    counts = [name for name in MidtrainConfig.model_fields if name.startswith("num_") and name != "num_steps"]
    sizes = {name: getattr(config.midtrain, name) // _SCALE for name in counts}
    config = config.model_copy(update={"midtrain": config.midtrain.model_copy(update=sizes)})
    keep_freed_memory()
    family = open_family(config)
    tokenizer = family.train_tokenizer(SilentObserver())
    documents = family.documents(open_renderer(tokenizer, AgentConfig()), SilentObserver())
    rounds: list[Figures] = []
    for number in range(options.rounds):
        rounds.append(measure_round(config, documents, tokenizer.vocab_size, options.seconds, number))
        print_table(f"round {number + 1}", rounds[-1])
    names = dict.fromkeys(name for one in rounds for name in one)
    figures = {name: statistics.median(one[name] for one in rounds if name in one) for name in names}
    print_table("medians", figures)
    bar = "0.45" if figures["wanted_share"] >= WANTED_SHARE else "0.8 of the roofline of its own shapes"
    print(f"training_share_of_matrix_rate is to reach {figures['wanted_share']:.2f}: {bar}")
    if options.json:
        write_result(options.json, figures, {"rounds": rounds})


if __name__ == "__main__":
    main()
