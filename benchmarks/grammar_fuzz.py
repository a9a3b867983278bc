"""Claim: grammar parsers never fail, whatever a model writes, and take linear time however input is chunked.

    python benchmarks/grammar_fuzz.py --inputs 1000000 --json out.json

Random and mutated messages in all grammars and both modes, each parsed whole and in random chunks. A
*failure* is an exception, a result that depends on the chunks, events that do not add up to their call, or a
long error message. Then time by length for inputs that provoke quadratic time, and time of a typical call.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.observe import commit, describe_machine, versions
from etude.records import ToolCall
from etude.tokens.grammar import (
    ArgumentDelta,
    CallFinished,
    CallStarted,
    Grammar,
    HermesGrammar,
    NativeGrammar,
    Parameter,
    ParseEvent,
    ReasoningDelta,
    ReasoningMarks,
    TextDelta,
    ToolSchema,
    XmlGrammar,
    collect,
    parse_events,
)
from etude.tokens.grammar.call_forms import CALL_FORMS
from etude.tokens.pieces import Control, Piece, spell

TOOLS = (
    ToolSchema(
        "read_file",
        "Read.",
        (Parameter("path", "file"), Parameter("offset", "line", required=False, kind="integer")),
    ),
    ToolSchema("edit", "Edit.", (Parameter("path", "file"), Parameter("text", "new text"))),
    ToolSchema(
        "plan",
        "Plan.",
        (
            Parameter("todos", "items", kind="array"),
            Parameter("merge", "whether", required=False, kind="boolean"),
            Parameter("extra", "more", required=False, kind="object"),
        ),
    ),
    ToolSchema("finish", "End."),
)
GRAMMARS: tuple[Grammar, ...] = (
    XmlGrammar(TOOLS),
    HermesGrammar(TOOLS),
    *(NativeGrammar(form, TOOLS) for form in CALL_FORMS),
)
_MARKS: tuple[ReasoningMarks | None, ...] = (None, "control", "text", "off")
_LONGEST_ERROR = 100
_NOISE = [
    *("<", ">", "</", "<think>", "</think>", "\n", " ", "{", "}", "[", "]", '"', "\\", "\\u", "\\ud83d"),
    *(
        "\\ude00",
        ":",
        ",",
        "NaN",
        "1e9",
        "-0",
        "true",
        "null",
        "\0",
        "\ud800",
        "\x7f",
        "é",
        "\u2028",
        "x" * 40,
    ),
    *("<open_file>", "</open_file>", "<tool_call>", "</tool_call>", '{"name": "edit", "arguments": {'),
]


@dataclass(frozen=True, slots=True)
class Failure:
    """One input that a parser handled wrongly."""

    what: str
    seed: int
    grammar: str
    text_mode: bool


def random_call(rng: random.Random) -> ToolCall:
    """A well-formed call of one of the tools."""
    text = "".join(
        rng.choice(["a", "\n", " ", "<", '"', "\\", "é", "</path>", "😀"]) for _ in range(rng.randrange(8))
    )
    return rng.choice(
        [
            ToolCall("read_file", {"path": text, "offset": str(rng.randrange(100))}),
            ToolCall("edit", {"path": "a.py", "text": text}),
            ToolCall("plan", {"todos": json.dumps([text, {"id": 1}]), "merge": "true"}),
            ToolCall("finish"),
        ]
    )


def random_message(rng: random.Random, grammar: Grammar, text_mode: bool) -> list[Piece]:
    """Calls, noise and reasoning, perhaps mutated character by character."""
    noise = [*_NOISE, *grammar.control_tokens()]
    pieces: list[Piece] = []
    for _ in range(rng.randrange(1, 7)):
        kind = rng.random()
        if kind < 0.4:
            pieces += grammar.render_calls([random_call(rng)], bool(pieces))
        elif kind < 0.5:
            pieces.append(Control(rng.choice([*grammar.control_tokens(), "<think>", "</think>", "<|user|>"])))
        else:
            pieces.append("".join(rng.choice(noise) for _ in range(rng.randrange(5))))
    if text_mode:
        pieces = [spell(pieces)]
    if rng.random() < 0.6:
        pieces = [mutated(rng, piece) if isinstance(piece, str) else piece for piece in pieces]
        if len(pieces) > 1 and rng.random() < 0.5:
            del pieces[rng.randrange(len(pieces))]
    return pieces


def mutated(rng: random.Random, text: str) -> str:
    """The text with a few characters dropped, doubled or inserted."""
    characters = list(text)
    for _ in range(rng.randrange(4)):
        if not characters:
            break
        position = rng.randrange(len(characters))
        match rng.randrange(3):
            case 0:
                del characters[position : position + rng.randrange(1, 4)]
            case 1:
                characters.insert(position, characters[position])
            case _:
                characters.insert(position, rng.choice(_NOISE))
    return "".join(characters)


def cut(rng: random.Random, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same message with its texts cut into random chunks."""
    longest = rng.choice([1, 2, 5, 30])
    sizes = itertools.cycle([rng.randrange(longest) + 1 for _ in range(11)])
    for piece in pieces:
        if isinstance(piece, Control):
            yield piece
            continue
        position = 0
        while position < len(piece):
            size = next(sizes)
            yield piece[position : position + size]
            position += size


def merge_deltas(events: Iterable[ParseEvent]) -> list[ParseEvent]:
    """Merges adjacent deltas of one kind (and argument): the result must not depend on the chunks."""

    def kind(event: ParseEvent) -> object:
        if isinstance(event, ArgumentDelta):
            return event.name
        return type(event) if isinstance(event, TextDelta | ReasoningDelta) else id(event)

    merged: list[ParseEvent] = []
    for _, run in itertools.groupby(list(events), kind):
        first, *rest = run
        if isinstance(first, TextDelta | ReasoningDelta | ArgumentDelta):
            texts = (one.text for one in rest if isinstance(one, type(first)))
            first = replace(first, text="".join([first.text, *texts]))
        merged.append(first)
    return merged


def fault_of(events: list[ParseEvent], names: frozenset[str]) -> str | None:
    """The error in the events of one message; None if there is none."""
    deltas: dict[str, str] | None = None
    for event in events:
        if isinstance(event, CallStarted):
            if deltas is not None:
                return "calls overlap"
            deltas = {}
        elif isinstance(event, ArgumentDelta):
            if deltas is None:
                return "an argument outside of a call"
            deltas[event.name] = deltas.get(event.name, "") + event.text
        elif isinstance(event, CallFinished):
            if deltas is None:
                return "a call that never started"
            call = event.call
            if call.error is None and deltas != {name: text for name, text in call.arguments.items() if text}:
                return "deltas do not add up"
            if call.error is None and call.name not in names:
                return "an unknown tool passed"
            if call.error is not None and not 0 < len(call.error) <= _LONGEST_ERROR:
                return "an error of no use"
            deltas = None
    return None if deltas is None else "a call that never finished"


def fuzz(seeds: range) -> list[Failure]:
    """The failures among one message per seed."""
    names = frozenset(tool.name for tool in TOOLS)
    failures: list[Failure] = []
    for seed in seeds:
        rng = random.Random(seed)
        grammar, text_mode = GRAMMARS[(seed >> 1) % len(GRAMMARS)], bool(seed & 1)
        try:
            pieces = random_message(rng, grammar, text_mode)
            reasoning, begun = rng.choice(_MARKS), rng.random() < 0.1
            whole = merge_deltas(parse_events(grammar.parser(text_mode, reasoning, begun), pieces))
            parts = list(cut(rng, pieces))
            again = merge_deltas(parse_events(grammar.parser(text_mode, reasoning, begun), parts))
            what = fault_of(whole, names) or (None if whole == again else "cuts differ")
        except Exception as error:  # counted and shown: such failures are what the fuzzer looks for
            what = f"{type(error).__name__}: {error}"
        if what:
            failures.append(Failure(what, seed, grammar.name, text_mode))
    return failures


def run_fuzz(num_inputs: int, first_seed: int, processes: int) -> tuple[list[Failure], float]:
    """(failures among `num_inputs` messages, seconds)."""
    start_s = time.perf_counter()
    step = 20_000
    ranges = [
        range(first, min(first + step, first_seed + num_inputs))
        for first in range(first_seed, first_seed + num_inputs, step)
    ]
    failures: list[Failure] = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, part in enumerate(pool.imap_unordered(fuzz, ranges), start=1):
            failures += part
            print(f"{min(done * step, num_inputs)} inputs, {len(failures)} failures", file=sys.stderr)
    return failures, time.perf_counter() - start_s


_ARGUMENTS = '<tool_call>{"name": "plan", "arguments": {'
_STRING = '<tool_call>{"name": "edit", "arguments": {"path": "a", "text": "'
_BODY = "<edit><path>a</path><text>"
TRAPS: dict[str, tuple[str, str, str]] = {
    "half tags": ("xml hermes", "", "<tool_call<read_file"),
    "many <": ("xml hermes", "", "<"),
    "free text": ("xml hermes", "", "x"),
    "think tags": ("xml hermes", "", "<think></think>"),
    "unclosed think of half closings": ("xml hermes", "<think>", "</thin"),
    "opening tags": ("xml", "", "<read_file><path>"),
    "opening tags of tools": ("xml", "", "<read_file>"),
    "unknown tools": ("xml", "", "<open_file><path></path></open_file>"),
    "an unknown tool with half closings": ("xml", "<open_file><path></path>", "</open_fil"),
    "body of <": ("xml", _BODY, "<"),
    "body of newlines": ("xml", _BODY, "\n"),
    "body of half closings": ("xml", _BODY, "</tex"),
    "opening tags of calls": ("hermes", "", "<tool_call>"),
    "empty calls": ("hermes", "", "<tool_call>{}</tool_call>"),
    "nested braces": ("hermes", _ARGUMENTS + '"extra": ', '{"a":'),
    "array of arrays": ("hermes", _ARGUMENTS + '"todos": [', "[1],"),
    "array of objects": ("hermes", _ARGUMENTS + '"todos": [', '{"a":"b"},'),
    "array of numbers": ("hermes", _ARGUMENTS + '"todos": [', "1,"),
    "digits": ("hermes", _ARGUMENTS + '"todos": [', "1"),
    "blanks": ("hermes", "<tool_call>{", " "),
    "unclosed string": ("hermes", _STRING, "x"),
    "string of escapes": ("hermes", _STRING, "\\n"),
    "string of half tags": ("hermes", _STRING, "</tool_cal"),
    "string of surrogate pairs": ("hermes", _STRING, "\\ud83d\\ude00"),
    "unclosed key": ("hermes", "<tool_call>{", '"x'),
}
"""Trap -> (grammars it applies to, its beginning, the repeated part). All in text mode."""


def seconds_for(grammar: Grammar, text: str, piece_size: int, text_mode: bool = True) -> float:
    """Processor time to parse `text` in chunks of `piece_size` characters."""
    parser = grammar.parser(text_mode, "text")
    gc.disable()
    try:
        start_s = time.process_time()
        for position in range(0, len(text), piece_size):
            parser.feed_events(text[position : position + piece_size])
        parser.finish_events()
        return time.process_time() - start_s
    finally:
        gc.enable()


def slope(lengths: list[int], times_s: list[float]) -> float:
    """Exponent of time over length: least squares in logarithms. 1 is linear, 2 quadratic."""
    xs, ys = [math.log(n) for n in lengths], [math.log(max(t, 1e-9)) for t in times_s]
    return statistics.linear_regression(xs, ys).slope


def measure_traps(largest: int) -> dict[str, dict[str, float]]:
    """Exponent and speed of each trap: up to `largest` characters whole, up to 1 % of it by character."""
    rows: dict[str, dict[str, float]] = {}
    for name, (meant_for, head, unit) in TRAPS.items():
        for grammar in GRAMMARS:
            if grammar.name not in meant_for.split():
                continue
            for piece_size, top in ((1 << 30, largest), (1, largest // 100)):
                lengths = [top // 16, top // 4, top]
                texts = [head + unit * (length // len(unit)) for length in lengths]
                times = [seconds_for(grammar, text, piece_size) for text in texts]
                how = "whole" if piece_size > 1 else "by character"
                rows[f"{name} / {grammar.name} / {how}"] = {
                    "exponent": slope([len(text) for text in texts], times),
                    "ns_per_character": times[-1] / len(texts[-1]) * 1e9,
                }
    return rows


def measure_body(num_characters: int) -> dict[str, dict[str, float]]:
    """A call body parsed character by character: seconds, and growth of the process's peak memory in MB.

    Call it before anything that needs much memory: the peak never falls.
    """
    heads = {
        "xml": "<edit><path>a</path><text>",
        "hermes": '<tool_call>{"name": "edit", "arguments": {"text": "',
    }
    closings = {"xml": "</text></edit>", "hermes": '"}}</tool_call>'}
    rows: dict[str, dict[str, float]] = {}
    for grammar in GRAMMARS:
        if grammar.name not in heads:
            continue
        parser = grammar.parser(True)
        parser.feed_events(heads[grammar.name])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start_s = time.process_time()
        for _ in range(num_characters):
            parser.feed_events("x")
        calls = collect([*parser.feed_events(closings[grammar.name]), *parser.finish_events()]).calls
        rows[grammar.name] = {
            "seconds": time.process_time() - start_s,
            "peak_growth_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
            "malformed": float(calls[0].error is not None),
        }
    return rows


_TYPICAL_TEXT = "\n".join(
    f"    for index, item in enumerate(rows[{n}:]):\n        total += item" for n in range(9)
)
TYPICAL = ToolCall("edit", {"path": "src/package/module.py", "text": _TYPICAL_TEXT})
"""About 200 tokens of a coding model's tokenizer: 4 characters each."""


def measure_call(repeats: int = 2000) -> dict[str, float]:
    """Microseconds for the typical call: whole, and in chunks of 4 characters, as it is sampled."""
    rows: dict[str, float] = {}
    for grammar in GRAMMARS:
        rendered = grammar.render_calls([TYPICAL], False)
        for text_mode in (False, True):
            whole: list[Piece] = [spell(rendered)] if text_mode else rendered
            parts = [part for piece in whole for part in _in_fours(piece)]
            mode = "text" if text_mode else "token"
            for how, pieces in (("whole", whole), (f"{len(parts)} pieces", parts)):
                assert [e for e in _parse(grammar, text_mode, pieces) if isinstance(e, CallFinished)]
                times = [
                    _time_s(lambda g=grammar, t=text_mode, p=pieces: _parse(g, t, p)) for _ in range(repeats)
                ]
                rows[f"{grammar.name} / {mode} mode / {how}"] = statistics.median(times) * 1e6
    return rows


def _in_fours(piece: Piece) -> list[Piece]:
    return [piece] if isinstance(piece, Control) else [piece[i : i + 4] for i in range(0, len(piece), 4)]


def _parse(grammar: Grammar, text_mode: bool, pieces: list[Piece]) -> list[ParseEvent]:
    return parse_events(grammar.parser(text_mode), pieces)


def _time_s(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def main() -> int:
    """Runs everything; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="first seed; input n has seed + n")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--largest", type=int, default=10_000_000, help="characters of the longest trap")
    parser.add_argument("--body", type=int, default=100_000_000, help="characters of the one huge body")
    parser.add_argument("--skip-traps", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"call_us": measure_call()}
    for name, microseconds in result["call_us"].items():
        print(f"{name:40s} {microseconds:10.1f} us")
    failures, fuzz_s = (
        run_fuzz(options.inputs, options.seed, options.processes) if options.inputs else ([], 0.0)
    )
    result["inputs"], result["failures"], result["fuzz_s"] = options.inputs, len(failures), fuzz_s
    print(f"{options.inputs} inputs, {len(failures)} failures, {fuzz_s:.0f} s")
    for failure in failures[:20]:
        print(f"  {failure}")
    result["body"] = measure_body(options.body) if options.body else {}
    for name, row in result["body"].items():
        print(f"body of {options.body} characters, {name}: {row}")
    result["traps"] = {} if options.skip_traps else measure_traps(options.largest)
    for name, row in result["traps"].items():
        print(f"{name:50s} exponent {row['exponent']:5.2f} {row['ns_per_character']:9.1f} ns/character")
    if options.json:
        result |= {"machine": describe_machine(), "versions": versions(), "commit": commit()}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
