"""Protocol of the inference benchmark's workers: load a model, then play the workloads named on stdin.

A worker is a process of its own, so that each peer has its interpreter, its libraries and its threads. Its
first argument is JSON (the settings); then every line on standard input is the path of a workload, answered
by one line of JSON. The standard library only, since peers live in environments of their own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Tokens = list[int]


@dataclass(frozen=True)
class Turn:
    """One turn: input tokens, and the number of tokens to sample after them, whatever they are."""

    input: Tokens
    output: int


Sessions = list[list[Turn]]
"""The turns of each session."""
Player = Callable[[Sessions], int]
"""Plays all sessions concurrently, the turns of each in order; returns the number of tokens sampled."""


class Batcher(Protocol):
    """An engine that accepts requests at any time."""

    def add(self, session: int, history: Tokens, new: int, output: int) -> None:
        """Starts a turn. `history`: the session's tokens, of which the engine has not seen the last `new`."""
        ...

    def wait(self) -> list[tuple[int, Tokens]]:
        """(session, sampled tokens) of turns completed now; may be empty."""
        ...


def play_with(batcher: Batcher, sessions: Sessions) -> int:
    """A Player over a Batcher: a session's next turn is sent as soon as its last one is complete."""
    histories: list[Tokens] = [[] for _ in sessions]
    turns = [0] * len(sessions)
    sampled = unfinished = 0

    def send(session: int) -> None:
        turn = sessions[session][turns[session]]
        histories[session] += turn.input
        batcher.add(session, histories[session], len(turn.input), turn.output)

    for session in range(len(sessions)):
        send(session)
        unfinished += 1
    while unfinished:
        for session, tokens in batcher.wait():
            assert len(tokens) == sessions[session][turns[session]].output, "an answer ended early"
            sampled += len(tokens)
            histories[session] += tokens
            turns[session] += 1
            if turns[session] < len(sessions[session]):
                send(session)
            else:
                unfinished -= 1
    return sampled


def read_sessions(path: str) -> Sessions:
    """A workload file: a list of sessions, which are lists of {"input": tokens, "output": number}."""
    stored = json.loads(Path(path).read_text(encoding="utf-8"))
    return [[Turn(turn["input"], turn["output"]) for turn in session] for session in stored]


def serve(make_player: Callable[[dict[str, Any]], Player]) -> None:
    """The worker's main function. Output of libraries is redirected to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**values: float) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    player = make_player(json.loads(sys.argv[1]))
    answer(ready=1)
    for line in sys.stdin:
        sessions = read_sessions(line.strip())
        gc.collect()
        began, processor = time.perf_counter(), time.process_time()
        sampled = player(sessions)
        answer(
            wall_s=time.perf_counter() - began,
            processor_s=time.process_time() - processor,
            output_tokens=sampled,
        )
