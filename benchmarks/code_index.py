"""The code index against ripgrep: equal matches, and how much faster; then semantic search, if installed.

    python benchmarks/code_index.py [--json FILE] [--directory DIR] [--size-mb 1100] [--quick]

A tree of installed sources (see code_index_corpus.py) is made once in DIR and kept. Patterns are drawn from
its lines. Equality is checked for every pattern on a smaller tree of the same kind, and on the large one for
the timed patterns. Timed: wall time of our search and of ripgrep's command, one after the other, both with
their output read through a pipe.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.code_index_corpus import make_tree
from benchmarks.code_index_patterns import PatternMaker
from benchmarks.common import print_table, write_result

from etude.agent.index.grep import GrepIndex, GrepQuery, GrepResult
from etude.agent.index.grep.ripgrep import Ripgrep

SELECTIVE_FILES = 100
"""A pattern that matches in at most so many files counts as selective."""
_MIB = 1 << 20


def sample_lines(tree: Path, count: int, seed: int) -> list[str]:
    """Lines from uniformly chosen files, from which patterns are drawn."""
    names = sorted(os.fspath(path) for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts)
    rng = random.Random(seed)
    lines: list[str] = []
    for name in rng.sample(names, min(count, len(names))):
        text = Path(name).read_bytes().decode("utf-8", "ignore").splitlines()
        lines += rng.sample(text, min(20, len(text)))
    return lines


def run_ripgrep(tree: Path, query: GrepQuery) -> tuple[bytes, float]:
    """Runs ripgrep: (output, seconds)."""
    flags = ["--no-config", "--no-ignore", "--no-heading", "--null", "--line-number", "--color=never"]
    command = [str(Ripgrep().program), *flags, *query.pattern_flags(), "./"]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.stdout, time.perf_counter() - began


def same(output: bytes, result: GrepResult) -> bool:
    """Whether ripgrep printed exactly these lines, in any order."""
    lines = (line for line in output.split(b"\n") if b"\0" in line)
    theirs = sorted(line.removeprefix(b"./") for line in lines)
    ours = sorted(
        f"{match.path}\0{match.line_number}:{match.line}".encode("utf-8", "surrogateescape")
        for match in result.matches
    )
    return ours == theirs


def num_files(tree: Path, query: GrepQuery) -> int:
    """Number of files in which ripgrep finds a match; warms the page cache."""
    command = [
        str(Ripgrep().program),
        "--no-config",
        "--no-ignore",
        "--files-with-matches",
        "--null",
        *query.pattern_flags(),
        "./",
    ]
    done = subprocess.run(command, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.stdout.count(b"\0")


async def check_identity(tree: Path, into: Path, count: int) -> dict[str, float]:
    """Compares the results of `count` patterns, half of them broad, on the small tree."""
    index = await GrepIndex.build(tree, into)
    maker = PatternMaker(sample_lines(tree, 300, 1), seed=1)
    different = 0
    for number in range(count):
        query = maker.broad() if number % 2 else maker.selective()
        output, _ = run_ripgrep(tree, query)
        if not same(output, await index.search(query)):
            different += 1
            print(f"DIFFERENT: {query}", file=sys.stderr)
    return {"identity_patterns": count, "identity_differences": different}


async def time_queries(
    index: GrepIndex, queries: Iterable[GrepQuery], wanted: Callable[[int], bool], count: int, check: bool
) -> dict[str, list[float]]:
    """Pairs of times for the first `count` queries whose number of matching files is `wanted`."""
    found: dict[str, list[float]] = {"ours_s": [], "ripgrep_s": [], "candidates": [], "differences": []}
    for query in queries:
        if len(found["ours_s"]) == count:
            break
        if not wanted(num_files(index.root, query)):
            continue
        output, ripgrep_s = run_ripgrep(index.root, query)
        if len(output) > query.max_bytes:
            continue  # ours stops at its output limit, and would look faster for that reason
        began = time.perf_counter()
        result = await index.search(query)
        found["ours_s"].append(time.perf_counter() - began)
        found["ripgrep_s"].append(ripgrep_s)
        found["candidates"].append(result.candidates)
        found["differences"].append(float(check and not same(output, result)))
        print(f"{ripgrep_s / found['ours_s'][-1]:6.1f}x {query.pattern!r}", file=sys.stderr, flush=True)
    return found


def summary(name: str, found: dict[str, list[float]]) -> dict[str, float]:
    """Medians of times and ratios, and the tail of the ratios."""
    ratios = sorted(theirs / ours for ours, theirs in zip(found["ours_s"], found["ripgrep_s"], strict=True))
    return {
        f"{name}_patterns": len(ratios),
        f"{name}_ours_ms": statistics.median(found["ours_s"]) * 1e3,
        f"{name}_ripgrep_ms": statistics.median(found["ripgrep_s"]) * 1e3,
        f"{name}_times_faster": statistics.median(ratios),
        f"{name}_times_faster_p10": ratios[len(ratios) // 10],
        f"{name}_candidates": statistics.median(found["candidates"]),
        f"{name}_differences": sum(found["differences"]),
    }


def cpu_s() -> float:
    """Processor time of this process and its finished children: a busy machine does not distort it."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def measured(work: Any) -> tuple[Any, float, float]:
    """Result, wall time and processor time of an awaitable."""
    began, cpu = time.perf_counter(), cpu_s()
    result = await work
    return result, time.perf_counter() - began, cpu_s() - cpu


async def time_edits(index: GrepIndex, lines: list[str]) -> dict[str, float]:
    """Searches with 100 edited files in an overlay."""
    maker = PatternMaker(lines, seed=5)
    drawn = (maker.identifier() for _ in range(80))
    queries = [query for query in drawn if num_files(index.root, query) <= SELECTIVE_FILES]
    plain = [(await measured(index.search(query)))[1] for query in queries]
    with index.overlay() as overlay:
        for number in range(100):
            overlay.write(f"edited/file{number}.py", f"fresh_name_{number} = 1\n".encode() * 200)
        await overlay.search(queries[0])
        edited = [(await measured(overlay.search(query)))[1] for query in queries]
    return {
        "query_without_edits_ms": statistics.median(plain) * 1e3,
        "query_with_100_edits_ms": statistics.median(edited) * 1e3,
    }


async def grep_figures(directory: Path, size_bytes: int, patterns: int, timed: int) -> dict[str, float]:
    """All figures of grep through the index."""
    tree, small = directory / "tree", directory / "small"
    corpus = make_tree(tree, size_bytes)
    make_tree(small, min(size_bytes, 8 * _MIB), seed=7)
    figures: dict[str, float] = {"tree_files": corpus["num_files"], "tree_mb": corpus["num_bytes"] / 1e6}
    with tempfile.TemporaryDirectory(dir=directory) as work:
        figures |= await check_identity(small, Path(work) / "small", patterns)
        print(figures, file=sys.stderr, flush=True)
        index, build_s, build_cpu_s = await measured(GrepIndex.build(tree, Path(work) / "index"))
        figures |= {"build_s": build_s, "build_cpu_s": build_cpu_s, "index_mb": index.size_bytes / 1e6}
        print(figures, file=sys.stderr, flush=True)
        began = time.perf_counter()
        index = GrepIndex.open(index.directory)
        figures["open_ms"] = (time.perf_counter() - began) * 1e3
        lines = sample_lines(tree, 400, 2)
        maker = PatternMaker(lines, seed=3)
        chosen = iter(maker.selective, None)
        few: Callable[[int], bool] = lambda files: files <= SELECTIVE_FILES  # noqa: E731
        selective = await time_queries(index, chosen, few, timed, check=True)
        figures |= summary("selective", selective)
        chosen = iter(maker.broad, None)
        broad = await time_queries(
            index, chosen, lambda files: files > 0.25 * index.num_files, max(4, timed // 8), check=False
        )
        figures |= summary("broad", broad)
        figures |= {
            "grep_vs_ripgrep_selective": figures["selective_times_faster"],
            "grep_vs_ripgrep_unselective": figures["broad_times_faster"],
            "grep_mismatches": figures["identity_differences"] + figures["selective_differences"],
        }
        figures |= await time_edits(index, lines)
    return figures


def semantic_figures() -> dict[str, float]:
    """Figures of semantic search; empty if it is not installed."""
    try:
        module = importlib.import_module("benchmarks.code_index_semantic")
    except ModuleNotFoundError as error:
        print(f"semantic search: left out ({error})", file=sys.stderr)
        return {}
    return module.semantic_figures()


def main() -> None:
    """Measures and prints."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "etude-code-index")
    parser.add_argument("--size-mb", type=int, default=1100)
    parser.add_argument("--patterns", type=int, default=1000)
    parser.add_argument("--timed", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="small: figures mean nothing")
    parser.add_argument("--grep-only", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.directory, options.size_mb = options.directory / "quick", 20
        options.patterns, options.timed = 40, 8
    options.directory.mkdir(parents=True, exist_ok=True)
    figures = asyncio.run(
        grep_figures(options.directory, options.size_mb * 1_000_000, options.patterns, options.timed)
    )
    print_table("instant grep", figures)
    if not options.grep_only:
        semantic = semantic_figures()
        numbers = {name: value for name, value in semantic.items() if isinstance(value, int | float)}
        print_table("semantic search", numbers)
        figures |= numbers
    if options.json:
        write_result(options.json, figures, {"ripgrep": "14.1.0"})


if __name__ == "__main__":
    main()
