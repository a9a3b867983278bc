"""Episodes of a foreign agent: a program in the sandbox that asks the run's endpoint, graded as any other."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from etude.config import RunConfig
from etude.controller.harness import open_environment
from etude.environment.episodes import EpisodeLimits
from etude.records import SamplingParams, Status, Trajectory, TrajectoryId
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.machine_backend import MachineBackend
from etude.store.blobs import MemoryBlobs
from tests.environment.playing import TASK
from tests.environment.recording.recording_builders import TellingSampler, qwen_tokenizer, replies

AGENT = textwrap.dedent(
    """
    import json, os, subprocess, sys, urllib.request
    def ask(messages):
        body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "temperature": 0.3})
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        request = urllib.request.Request(url, body.encode(), headers)
        return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": sys.argv[1]}]
    while True:
        answer = ask(messages)
        if answer == "done":
            break
        done = subprocess.run(answer, shell=True, capture_output=True, text=True)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": done.stdout or "ok"}]
    """
)
COMMAND = f"cat > /tmp/agent.py <<'END'\n{AGENT}\nEND\nexec python3 /tmp/agent.py {{instruction}}"
MEND = "printf 'def tally(xs):\\n    return sum(xs)\\n' > lib/tally.py"


def play(
    state: Path, answers: Sequence[str], *, command: str = COMMAND, timeout_s: float = 60.0, failures: int = 0
) -> tuple[Trajectory, TellingSampler]:
    """One episode in a local sandbox; a sampler that plays the answers."""
    harness = {"command": command, "timeout_s": timeout_s}
    agent = {"harness": harness, "max_message_tokens": 200}
    config = RunConfig.model_validate({"agent": agent})
    sampler = TellingSampler(replies(answers), refusals=failures)

    async def scenario() -> Trajectory:
        backend: MachineBackend = LocalBackend(state)
        limits, blobs = EpisodeLimits.from_config(config), MemoryBlobs()
        try:
            async with open_environment(config, backend, qwen_tokenizer(), limits, blobs.put) as runner:
                identity = TrajectoryId("run", TASK.id, 0, 0, 0)
                return await runner.run(TASK, identity, sampler, (7, 1), SamplingParams(), training=True)
        finally:
            await backend.close()

    return asyncio.run(scenario()), sampler


def test_a_foreign_agent_solves_its_task_and_its_tokens_are_recorded_as_sampled(tmp_path: Path) -> None:
    trajectory, sampler = play(tmp_path, ["cat lib/tally.py", MEND, "done"])
    assert trajectory.status is Status.DONE and trajectory.reward is not None
    assert trajectory.reward.task == 1.0 and trajectory.facts["passed"]
    (segment,) = trajectory.segments
    sampled = [chunk for chunks in sampler.given.values() for chunk in chunks]
    assert segment.logprobs[segment.sampled].tolist() == [x for one in sampled for x in one.logprobs.tolist()]
    assert segment.routes is not None and segment.sampling.temperature == 1.0
    assert [turn.text.removesuffix("<|im_end|>") for turn in trajectory.turns] == ["cat lib/tally.py", MEND, "done"]
