"""Semantic code search: recall of the function that a docstring describes, and the cost of the index.

python benchmarks/code_index_semantic.py [--json FILE] [--functions N] [--questions N]

The labelled set is made from installed packages (code_index_semantic_data.py). The share of vectors in a
score is chosen on the development half of the questions; every reported recall is of the held-out half.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from benchmarks.code_index_semantic_data import LabelledSet, Question, make_set
from benchmarks.common import print_table, write_result
from numpy.typing import NDArray

from etude.agent.index.semantic import Embedder, SemanticIndex, default_embedder
from etude.agent.index.semantic.index import VECTOR_SHARE, best, fuse_scores
from etude.agent.tools.ports import CodeHit

Figures = dict[str, float]

SEED = 7
NUM_FUNCTIONS = 12_000
NUM_QUESTIONS = 4_000
DEPTH = 10
"""Number of results among which the right one counts as found."""
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
NUM_RESAMPLES = 10_000


class CountingEmbedder:
    """An embedder that counts its calls and texts."""

    def __init__(self, inner: Embedder) -> None:
        self._inner = inner
        self.num_embedded = 0
        self.cpu_s = 0.0

    @property
    def key(self) -> str:
        return self._inner.key

    @property
    def dimension(self) -> int:
        return self._inner.dimension

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.num_embedded += len(texts)
        began_s = time.thread_time()
        rows = self._inner.embed(texts)
        self.cpu_s += time.thread_time() - began_s
        return rows

    def embed_question(self, question: str) -> NDArray[np.float32]:
        return self._inner.embed_question(question)


def semantic_figures(num_functions: int = NUM_FUNCTIONS, num_questions: int = NUM_QUESTIONS) -> Figures:
    """All figures; takes minutes, on one thread. Raises ConfigError without the extra `index`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="code-index-") as folder:
            return asyncio.run(_measure(Path(folder), make_set(num_functions, num_questions, SEED)))
    finally:
        torch.set_num_threads(threads)


async def _measure(folder: Path, labelled: LabelledSet) -> Figures:
    embedder = CountingEmbedder(default_embedder())
    tree = _write(folder / "tree", labelled.files)
    index = await SemanticIndex.open(folder / "store", tree, embedder)
    began_s = time.perf_counter()
    await index.update()
    built_s = time.perf_counter() - began_s
    num = embedder.num_embedded
    num_chunks = len((await index.compare("chunks")).words)
    figures: Figures = {
        "num_functions": labelled.num_functions,
        "num_chunks": num_chunks,
        "store_bytes_per_chunk": (folder / "store" / "index.sqlite").stat().st_size / num_chunks,
        "num_questions": len(labelled.questions),
        "build_s": built_s,
        "embed_1000_chunks_cpu_s": embedder.cpu_s / num * 1000,
    }
    figures |= await _recalls(index, num_chunks, labelled.questions)
    figures |= await _latency(index, labelled.questions)
    figures |= await _edit(index, embedder, labelled)
    figures |= await _one_percent(folder, labelled.files, index, embedder, built_s, num_chunks)
    await index.close()
    return figures


def _write(root: Path, files: Mapping[str, bytes]) -> Path:
    """Writes files dated a minute ago: the next update would read again what was written just now."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        os.utime(root / path, (time.time() - 60, time.time() - 60))
    return root


async def _recalls(index: SemanticIndex, num_chunks: int, questions: Sequence[Question]) -> Figures:
    """Recall of each ranking, and confidence intervals of the differences."""
    chunks = await index.describe(np.arange(num_chunks))
    hits: dict[str, list[bool]] = {}
    for question in questions:
        found = await index.compare(question.text)
        assert found.cosines is not None
        scores = {
            "semantic": found.cosines,
            "bm25": found.words,
            "ranks": _fuse_ranks(found.cosines, found.words),
        }
        scores |= {f"share_{share}": fuse_scores(found.cosines, found.words, share) for share in SHARES}
        for name, values in scores.items():
            order = best(values, DEPTH)
            hits.setdefault(name, []).append(any(_answers(chunks[i], question) for i in order))
    table = {name: np.array(values, dtype=float) for name, values in hits.items()}
    development = np.array([question.development for question in questions])
    figures: Figures = {f"development_{name}": float(table[name][development].mean()) for name in table}
    chosen = max(SHARES, key=lambda share: figures[f"development_share_{share}"])
    figures["share_chosen"], figures["share_shipped"] = chosen, VECTOR_SHARE
    held = ~development
    table["hybrid"] = table[f"share_{VECTOR_SHARE}"]
    for name in ("semantic", "bm25", "hybrid"):
        figures[f"{name}_recall_at_10"] = float(table[name][held].mean())
    figures["num_held_out"] = float(held.sum())
    files = np.array([question.path for question in questions])[held]
    for name in ("semantic", "bm25"):
        gain = (table["hybrid"] - table[name])[held]
        low, high = _interval(gain, files)
        figures |= {
            f"gain_over_{name}": gain.mean(),
            f"gain_over_{name}_low": low,
            f"gain_over_{name}_high": high,
        }
    return figures


def _fuse_ranks(
    cosines: NDArray[np.float32], words: NDArray[np.float32], share: float = 0.5, constant: float = 10.0
) -> NDArray[np.float32]:
    """Reciprocal rank fusion (SIGIR 2009), for comparison."""
    return (share / (constant + _ranks(cosines)) + (1 - share) / (constant + _ranks(words))).astype(
        np.float32
    )


def _ranks(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    ranks = np.empty(len(scores), dtype=np.int64)
    ranks[np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")] = np.arange(1, len(scores) + 1)
    return ranks


def _answers(chunk: CodeHit, question: Question) -> bool:
    overlaps = chunk.first_line <= question.last_line and chunk.last_line >= question.first_line
    return chunk.path == question.path and overlaps


def _interval(gains: NDArray[np.float64], files: NDArray[np.str_]) -> tuple[float, float]:
    """Bootstrap 95 % interval of the mean. Whole files are drawn: questions about one file are alike."""
    _, owners = np.unique(files, return_inverse=True)
    sums, sizes = np.bincount(owners, gains), np.bincount(owners)
    rng = np.random.default_rng(SEED)
    draws = rng.integers(len(sums), size=(NUM_RESAMPLES, len(sums)))
    means = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


async def _latency(index: SemanticIndex, questions: Sequence[Question]) -> Figures:
    times: list[float] = []
    for question in questions[:200]:
        began_s = time.perf_counter()
        await index.search(question.text, DEPTH)
        times.append(time.perf_counter() - began_s)
    return {"search_p50_ms": statistics.median(times) * 1e3}


async def _edit(index: SemanticIndex, embedder: CountingEmbedder, labelled: LabelledSet) -> Figures:
    """Time from an edit of one function to the first answer that reflects it."""
    rng = random.Random(SEED)
    times: list[float] = []
    counts: list[int] = []
    for number, path in enumerate(rng.sample(sorted(labelled.files), 20)):
        overlay, before = index.overlay(), embedder.num_embedded
        began_s = time.perf_counter()
        added = f"\n\ndef zebra_{number}(herd):\n    return herd.count({number})\n"
        overlay.write(path, labelled.files[path] + added.encode())
        result = await overlay.search(f"count of zebra {number} in a herd", DEPTH)
        times.append(time.perf_counter() - began_s)
        counts.append(embedder.num_embedded - before)
        if not result.complete or not any(hit.symbol == f"zebra_{number}" for hit in result.hits):
            raise SystemExit(f"an edit of {path} was not found: {result.hits}")
    return {"search_after_edit_p50_ms": statistics.median(times) * 1e3, "edit_chunks_embedded": max(counts)}


async def _one_percent(
    folder: Path,
    files: Mapping[str, bytes],
    index: SemanticIndex,
    embedder: CountingEmbedder,
    built_s: float,
    num_chunks: int,
) -> Figures:
    """Updates after one function in 1 % of the files was changed; then indexes a second checkout of them."""
    rng = random.Random(SEED)
    functions = [hit for hit in await index.describe(np.arange(num_chunks)) if hit.symbol]
    rng.shuffle(functions)
    by_path = {hit.path: hit for hit in functions}
    changed: dict[str, bytes] = {}
    for path in rng.sample(sorted(by_path), max(1, len(files) // 100)):
        lines = files[path].split(b"\n")
        row = by_path[path].first_line
        indent = b" " * (len(lines[row - 1]) - len(lines[row - 1].lstrip()))
        lines.insert(row - 1, indent + b"# changed")
        changed[path] = b"\n".join(lines)
    await asyncio.to_thread(_write, folder / "tree", changed)
    before = embedder.num_embedded
    began_s = time.perf_counter()
    await index.update()
    updated_s = time.perf_counter() - began_s
    reembedded = embedder.num_embedded - before
    root = await asyncio.to_thread(_write, folder / "second", {**files, **changed})
    second = await SemanticIndex.open(folder / "store", root, embedder)
    before = embedder.num_embedded
    await second.update()
    await second.close()
    return {
        "reembedded_share": reembedded / num_chunks,
        "update_share_of_build": updated_s / built_s,
        "second_checkout_share": (embedder.num_embedded - before) / num_chunks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--functions", type=int, default=NUM_FUNCTIONS)
    parser.add_argument("--questions", type=int, default=NUM_QUESTIONS)
    options = parser.parse_args()
    figures = semantic_figures(options.functions, options.questions)
    print_table("semantic code search", figures)
    if options.json:
        write_result(options.json, figures, {})


if __name__ == "__main__":
    main()
