"""A tiny checkpoint directory with a tokenizer, and `etude serve` over it as a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from etude.model.huggingface import save_model
from tests.environment.recording.recording_builders import qwen_tokenizer
from tests.model.builders import small_config

START_S = 120.0


def write_checkpoint(directory: Path, seed: int = 0, max_positions: int = 600) -> Path:
    """A random model whose tokenizer speaks Hermes in Qwen's frame."""
    tokenizer = qwen_tokenizer()
    from etude.model import build_model

    config = small_config(max_positions=max_positions)
    model = build_model(config, tokenizer.vocab_size)
    model.initialise(seed)
    save_model(model, directory)
    tokenizer.save(directory)
    return directory


@dataclass
class ServeProcess:
    """One `etude serve`."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list[str])

    def end(self, limit_s: float = 60.0) -> int:
        """Asks it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)


@contextlib.contextmanager
def serve_process(checkpoint: Path, *options: str) -> Iterator[ServeProcess]:
    """Runs `etude serve` on a free port until the block ends."""
    code = "from etude.cli import main; main()"
    arguments = [sys.executable, "-c", code, "serve", str(checkpoint), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
    served = ServeProcess(process)
    found = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            served.lines.append(line)
            if match := re.search(r"ready at (https?://[0-9.]+:\d+)", line):
                served.url = match[1]
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(START_S) and served.url, "".join(served.lines)
        yield served
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(60)
        assert process.stderr is not None
        process.stderr.close()
