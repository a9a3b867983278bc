"""Claim: an agent that was not written for Étude is trained by RL, unmodified, in a closed loop.

    python benchmarks/foreign_harness.py --agent mini --directory DIR --json FILE

An agent plays every session of `etude train --harness` in the sandboxes of 24 tasks. It is `mini`, in a
virtual environment DIR (`pip install mini-swe-agent==2.4.6 mcp`), or `claude` or `pi`, below DIR (`npm
install --prefix DIR @anthropic-ai/claude-code`, `@mariozechner/pi-coding-agent`); DIR is not below /tmp,
since sandboxes have a /tmp of their own.
The tasks: write a word that the instruction names into a file, which `tests/test.sh` checks. A small model
with random weights is first fine-tuned (`etude sft`) on chats in the agent's format: a share of them
(`--right`) writes the right word, the others one drawn from four. So it earns 1 in a part of the sessions,
and some groups have both rewards.

    harness_steps        RL steps that trained on groups with rewards 1 and 0
    reward_first, _last  mean reward of the first and the last step's sessions
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Figures, print_table, write_result
from harness_agents import AGENTS, HarnessAgent

from etude.config import ModelConfig
from etude.model import LanguageModel
from etude.model.huggingface import save_model
from etude.observe.metrics import read_metrics
from etude.records import Group
from etude.store.trajectories import TrajectoryLog
from etude.tokens import train_tokenizer

WORDS = ("red", "blue", "green", "black")
ORDERS = ("Write", "Put", "Store", "Save", "Note", "Keep")
_COMMAND = "from etude.cli import main; main()"
MARKS = ["<|im_start|>", "<|im_end|>"]
MODEL = ModelConfig(
    architecture="qwen3",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=192,
    max_positions=4096,
)
TEST = """#!/bin/sh
if [ "$(cat word.txt)" = {word} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
CONFIG = """
name = "harness"
device = "cpu"
num_threads = 1
initial_checkpoint = "{model}"
runs_directory = "{runs}"

[tasks]
family = "directory"
directory = "{tasks}"

[agent]
max_tokens = {max_tokens}
max_message_tokens = {max_message_tokens}

[agent.harness]
directory = "{agent}"
timeout_s = 300.0
max_running = 4

[sandbox]
memory_bytes = {memory_bytes}

[engine]
cache_tokens = 65536

[rl]
num_steps = {num_steps}
groups_per_step = 3
group_size = 4
updates_per_step = 1
max_refill_rounds = 1
max_staleness = {max_staleness}

[rl.reward.price]
validate_every = 0

[rl.optimizer]
learning_rate = {learning_rate}
warmup_steps = 0

[evaluation]
num_tasks = 4
num_samples = 1
num_repeated_tasks = 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agent", choices=AGENTS, default="mini", help="Which agent.")
    parser.add_argument("--directory", type=Path, required=True, help="Where the agent is installed.")
    parser.add_argument("--right", type=float, default=0.3, help="Share of chats that write the right word.")
    parser.add_argument("--steps", type=int, default=4, help="RL steps.")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="As rl.optimizer.learning_rate.")
    parser.add_argument("--max-staleness", type=int, default=0, help="As rl.max_staleness.")
    parser.add_argument("--keep", type=Path, help="Directory to work in, which is kept.")
    parser.add_argument("--json", type=Path, help="Where the figures are written.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = options.keep or Path(folder)
        agent = AGENTS[options.agent](options.directory)
        write_tasks(directory / "tasks")
        model = fine_tune(directory, agent, options.right)
        run = train(directory, model, agent, options)
        figures, notes = measure(run)
    print_table("a foreign agent in a closed loop", figures)
    if options.json:
        write_result(options.json, figures, notes)


def write_tasks(directory: Path) -> None:
    """Writes a task for each word and each wording of the instruction."""
    for word in WORDS:
        for order in ORDERS:
            files = {
                "task.toml": 'schema_version = "1.4"\n[environment]\ndocker_image = "host"\n',
                "instruction.md": instruction(order, word) + "\n",
                "tests/test.sh": TEST.format(word=word),
                "solution/solve.sh": f"#!/bin/sh\necho {word} > word.txt\n",
            }
            for path, text in files.items():
                target = directory / f"{order.lower()}-{word}" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")


def instruction(order: str, word: str) -> str:
    """The user's message."""
    return f"{order} the word {word} into word.txt."


def fine_tune(directory: Path, agent: HarnessAgent, right: float) -> Path:
    """Fine-tunes a model on the agent's format; in a share `right` of the chats the word is right."""
    drawn = random.Random(0)

    def draw(word: str) -> str:
        return word if drawn.random() < right else drawn.choice(WORDS)

    chats = [
        agent.chat(instruction(order, word), f"echo {draw(word)} > word.txt")
        for order in ORDERS * 20
        for word in WORDS
    ]
    texts = [json.dumps(chat, ensure_ascii=False) for chat in chats]
    tokenizer = train_tokenizer(texts, agent.vocab_size, MARKS)
    model = LanguageModel(MODEL, tokenizer.vocab_size)
    model.initialise(0)
    save_model(model, directory / "model")
    tokenizer.save(directory / "model")
    (directory / "chats.jsonl").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    sources = ["--from", str(directory / "model"), "--data", f"form={directory / 'chats.jsonl'}"]
    settings = {"runs_directory": f'"{directory / "runs"}"', "num_threads": "1", "device": '"cpu"'}
    settings |= {
        "sft.num_steps": "150",
        "sft.tokens_per_step": str(4 * agent.max_tokens),
        "sft.heldout_every_steps": "0",
    }
    settings |= {"sft.optimizer.learning_rate": "3e-3"}
    etude("sft", *sources, "--name", "form", *(f"--set={key}={value}" for key, value in settings.items()))
    return directory / "runs" / "form" / "checkpoints" / "final"


def train(directory: Path, model: Path, agent: HarnessAgent, options: argparse.Namespace) -> Path:
    """Trains with RL; returns the run's directory."""
    paths = {"runs": directory / "runs", "tasks": directory / "tasks", "agent": agent.directory}
    numbers = {"num_steps": options.steps, "max_staleness": options.max_staleness}
    numbers |= {"max_tokens": agent.max_tokens, "max_message_tokens": agent.max_message_tokens}
    numbers |= {"memory_bytes": agent.memory_bytes, "learning_rate": options.learning_rate}
    config = directory / "harness.toml"
    config.write_text(CONFIG.format(model=model, **paths, **numbers), encoding="utf-8")
    etude("train", "--config", str(config), "--harness", agent.command())
    return directory / "runs" / "harness"


def etude(*words: str) -> None:
    """Runs an etude command; it inherits standard output and error."""
    subprocess.run([sys.executable, "-c", _COMMAND, *words], check=True, stdout=sys.stderr)


def is_mixed(group: Group) -> bool:
    """Whether some of the group's sessions solved the task and some did not."""
    return {member.reward.task for member in group.members if member.reward} >= {0.0, 1.0}


def measure(run: Path) -> tuple[Figures, dict[str, Any]]:
    """(figures of a run, a row per step)."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "rl"]
    groups = list(TrajectoryLog(run / "trajectories").read())
    sessions = [member for group in groups for member in group.members]
    versions = sorted({session.oldest_version.step for session in sessions if session.oldest_version})
    steps = [
        {
            name: row[name]
            for name in ("reward", "trained_groups", "episodes", "infrastructure_failures", "turns")
        }
        for row in rows
    ]
    harness_s = [session.timings["harness_s"] for session in sessions if "harness_s" in session.timings]
    figures = {
        "harness_steps": float(sum(row["trained_groups"] > 0 for row in rows)),
        "sessions": float(len(sessions)),
        "mixed_groups": float(sum(map(is_mixed, groups))),
        "groups": float(len(groups)),
        "infrastructure_failures": sum(row["infrastructure_failures"] for row in rows),
        "versions_that_sampled": float(len(versions)),
        "reward_first": rows[0]["reward"],
        "reward_last": rows[-1]["reward"],
        "parity_k3_worst": max(row.get("parity_k3", 0.0) for row in rows),
        "session_s_median": statistics.median(harness_s),
    }
    return figures, {"steps": steps, "causes": sorted({session.cause for session in sessions})}


if __name__ == "__main__":
    main()
