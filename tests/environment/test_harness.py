"""Episodes of a foreign agent: a program in the sandbox that asks the run's endpoint, graded as any other."""

from __future__ import annotations

import asyncio
import shlex
import textwrap
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from etude.config import RunConfig
from etude.controller.harness import open_environment
from etude.environment import harness, recording
from etude.environment.episodes import EpisodeLimits
from etude.environment.harness import HarnessEnvironment
from etude.records import (
    SampleChunk,
    SampleRequest,
    SamplingParams,
    Status,
    Task,
    TaskStep,
    TestScript,
    Trajectory,
    TrajectoryId,
)
from etude.sandbox.machine_backend import MachineBackend
from etude.sandbox.types import CommandResult
from etude.store.blobs import MemoryBlobs
from tests.environment.playing import TASK
from tests.environment.recording.recording_builders import TellingSampler, qwen_tokenizer, replies
from tests.environment.test_steps import write_steps
from tests.sandbox.scenes import on_backend

AGENT = textwrap.dedent(
    """
    import json, os, subprocess, sys, urllib.request
    def ask(messages):
        asked = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "temperature": 0.3}
        body = json.dumps(asked | {"seed": 5})
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        request = urllib.request.Request(url, body.encode(), headers)
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        return answer["choices"][0]["message"]["content"]
    messages = [{"role": "user", "content": sys.argv[1]}]
    while (answer := ask(messages)) != "done":
        done = subprocess.run(answer, shell=True, capture_output=True, text=True)
        messages += [{"role": "assistant", "content": answer}]
        messages += [{"role": "user", "content": done.stdout or "ok"}]
    """
)
COMMAND = f"exec python3 -c {shlex.quote(AGENT)} {{instruction}}"
MEND = "printf 'def tally(xs):\\n    return sum(xs)\\n' > lib/tally.py"


def play(
    state: Path,
    answers: Sequence[str],
    *,
    command: str = COMMAND,
    timeout_s: float = 60.0,
    refusals: int = 0,
    backend: str = "local",
    sampler: TellingSampler | None = None,
    task: Task = TASK,
) -> tuple[Trajectory, TellingSampler]:
    """One episode, and the sampler that played the answers. `refusals`: requests that it fails first."""
    agent = {"harness": {"command": command, "timeout_s": timeout_s}, "max_message_tokens": 200}
    config = RunConfig.model_validate({"agent": agent})
    sampler = sampler or TellingSampler(replies(answers), refusals=refusals)
    identity = TrajectoryId("run", task.id, 0, 0, 0)

    async def scenario(backend: MachineBackend) -> Trajectory:
        limits, blobs = EpisodeLimits.from_config(config), MemoryBlobs()
        async with open_environment(config, backend, qwen_tokenizer(), limits, blobs.put) as runner:
            played = await runner.run(task, identity, sampler, (7, 1), SamplingParams(), training=True)
        assert not backend.own_server, "the way to the endpoint goes with it"
        return played

    return on_backend(state, scenario, backend), sampler


def test_a_foreign_agent_solves_its_task_and_its_tokens_are_recorded_as_sampled(tmp_path: Path) -> None:
    trajectory, sampler = play(tmp_path, ["cat lib/tally.py", MEND, "done"])
    assert (trajectory.status, trajectory.cause, trajectory.attempt) == (Status.DONE, "", 0)
    assert trajectory.reward is not None and trajectory.reward.task == 1.0 and trajectory.facts["passed"]
    (segment,) = trajectory.segments
    sampled = [chunk for chunks in sampler.given.values() for chunk in chunks]
    assert segment.logprobs[segment.sampled].tolist() == [x for one in sampled for x in one.logprobs.tolist()]
    assert segment.routes is not None and segment.sampling.temperature == 1.0, "as the run samples"
    said = [turn.text.removesuffix("<|im_end|>") for turn in trajectory.turns]
    assert said == ["cat lib/tally.py", MEND, "done"]
    assert {request.rng_key for request in sampler.inner.requests} == {(7, 1, 0)}
    assert sampler.closed == [segment.id]


@pytest.mark.filterwarnings("ignore:the unisolated")
def test_without_isolation_the_endpoint_is_reached_where_it_is(tmp_path: Path) -> None:
    trajectory, _ = play(tmp_path, [MEND, "done"], backend="unisolated")
    assert trajectory.status is Status.DONE and trajectory.facts["passed"]


def test_a_foreign_agent_begins_anew_with_each_step_of_its_task(tmp_path: Path) -> None:
    answers = [f"sed -i {n}s/.*/{word}/ words.txt" for n, word in ((1, "hello"), (2, "bye"))]
    task = write_steps(tmp_path / "task")
    trajectory, _ = play(tmp_path, [answers[0], "done", answers[1], "done"], task=task)
    assert (trajectory.status, trajectory.facts["passed"], len(trajectory.turns)) == (Status.DONE, True, 4)
    words = [step.instruction for step in task.steps]
    texts = [qwen_tokenizer().decode(segment.tokens) for segment in trajectory.segments]
    assert [[word in text for word in words] for text in texts] == [[True, False], [False, True]]


@pytest.mark.parametrize(
    ("results", "num_run", "status", "cause"),
    [
        (((0, False), (0, False)), 2, Status.DONE, ""),
        (((0, True), (0, False)), 1, Status.LIMIT, "time"),
        (((3, False), (0, False)), 2, Status.DONE, "exit 3: no"),
        (((3, False), (0, True)), 2, Status.LIMIT, "time"),
    ],
)
def test_a_limit_ends_all_steps_and_a_failure_in_one_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
    results: Sequence[tuple[int, bool]],
    num_run: int,
    status: Status,
    cause: str,
) -> None:
    given = iter([CommandResult(code, "", "no", timed_out, 0.0, False) for code, timed_out in results])

    async def run_command(*_: object) -> object:
        return harness._ending_of(next(given))

    async def next_step() -> str:
        return "go on"

    step = TaskStep("one", "", TestScript(b""))
    task = Task("t", "", {}, steps=(step, replace(step, name="two")))
    monkeypatch.setattr(HarnessEnvironment, "_run_command", run_command)
    environment = HarnessEnvironment.__new__(HarnessEnvironment)
    env_session: Any = SimpleNamespace(next_step=next_step)
    assert asyncio.run(environment._play(task, cast("Any", None), env_session)) == (status, cause)
    assert len(list(given)) == 2 - num_run


def test_an_agent_that_ends_with_an_error_is_graded_all_the_same(tmp_path: Path) -> None:
    trajectory, _ = play(tmp_path, [MEND, "done"], command=f"({COMMAND}) && echo no use >&2 && exit 3")
    assert (trajectory.status, trajectory.cause) == (Status.DONE, "exit 3: no use")
    assert trajectory.facts["passed"] and not trajectory.facts["finished"]


def test_an_agent_that_hangs_is_stopped_at_its_time_and_graded(tmp_path: Path) -> None:
    trajectory, _ = play(tmp_path, [MEND, "sleep 600"], timeout_s=2.0)
    assert (trajectory.status, trajectory.cause) == (Status.LIMIT, "time")
    assert trajectory.reward is not None and trajectory.reward.task == 1.0


class DeafSampler(TellingSampler):
    """Its second answer never comes, nor ends when it is aborted."""

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        if self.num_requests == 1:
            await asyncio.sleep(3600)
        async for chunk in super().stream(request):
            yield chunk


def test_a_session_that_ends_at_its_time_is_graded_though_its_last_answer_never_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "RecordingLimits", partial(recording.RecordingLimits, abort_s=0.2))
    sampler = DeafSampler(replies([MEND, "done"]))
    trajectory, _ = play(tmp_path, [], timeout_s=3.0, sampler=sampler)
    assert (trajectory.status, trajectory.cause, trajectory.attempt) == (Status.LIMIT, "time", 0)
    assert trajectory.reward is not None and trajectory.reward.task == 1.0
    assert (trajectory.facts["failed"], trajectory.facts["aborted"]) == (0, 1)


def test_the_command_may_compute_for_all_of_its_time(tmp_path: Path) -> None:
    command = f'test "$(ulimit -t)" -ge 100 && {COMMAND}'
    trajectory, _ = play(tmp_path, ["done"], command=command, timeout_s=100.0)
    assert trajectory.status is Status.DONE


def test_an_agent_that_ends_its_own_sandbox_has_failed(tmp_path: Path) -> None:
    trajectory, _ = play(tmp_path, [MEND, "kill -9 -1; kill -9 1; cat /dev/zero | tail"])
    assert trajectory.status in (Status.DONE, Status.AGENT_ERROR)
    assert trajectory.reward is not None, "what the agent did is never the infrastructure's failure"


@pytest.mark.parametrize("command", ["no-such-agent {instruction}", "true", "sleep 60"])
def test_a_command_that_never_asks_is_tried_again_and_no_reward(tmp_path: Path, command: str) -> None:
    trajectory, _ = play(tmp_path, [], command=command, timeout_s=0.5)
    assert (trajectory.status, trajectory.reward, trajectory.attempt) == (Status.INFRASTRUCTURE, None, 2)
    assert trajectory.cause.startswith("SandboxError: ") and "never had an answer" in trajectory.cause


@pytest.mark.parametrize(
    ("asked", "instead", "told"),
    [
        ('"temperature": 0.3', '"n": 2', "one answer is recorded for each request"),
        (": messages,", ": messages * 900,", "fix: raise agent.max_tokens, which is 640"),
    ],
)
def test_what_the_agent_was_refused_is_the_reason_of_a_session_without_an_answer(
    tmp_path: Path, asked: str, instead: str, told: str
) -> None:
    trajectory, _ = play(tmp_path, [], command=COMMAND.replace(asked, instead))
    assert trajectory.status is Status.INFRASTRUCTURE
    assert "never had an answer" in trajectory.cause and told in trajectory.cause


def test_a_program_that_aborts_before_it_asks_may_lack_memory(tmp_path: Path) -> None:
    trajectory, _ = play(tmp_path, [], command="exit 134")
    assert "fix: raise sandbox.memory_bytes" in trajectory.cause


def test_an_answer_that_the_sampler_failed_begins_the_episode_again(tmp_path: Path) -> None:
    trajectory, _ = play(tmp_path, [MEND, "done"], refusals=1)
    assert (trajectory.status, trajectory.attempt) == (Status.DONE, 1)
    assert trajectory.reward is not None and trajectory.reward.task == 1.0


def test_calls_of_tools_that_were_not_offered_stay_words_of_the_agent(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    trajectory, _ = play(tmp_path, [call, "done"])
    assert trajectory.status is Status.DONE and trajectory.facts["malformed"] == 1
    assert trajectory.reward is not None and trajectory.reward.task == 0.0


def test_an_agent_reaches_nothing_but_its_own_session(tmp_path: Path) -> None:
    look = textwrap.dedent(
        """
        import http.client, os, re, urllib.error, urllib.request
        base = os.environ["OPENAI_BASE_URL"]
        root = re.match("http://[^/]*", base)[0]
        others = (root + "/sessions", root + "/s/0/v1/models", root + "/v1/models", "http://127.0.0.1:1/")
        shown = tuple(root + path for path in ("/health", "/metrics", "/openapi.json"))
        for url in (base + "/models", *others, *shown):
            try:
                print(urllib.request.urlopen(url, timeout=20).status)
            except urllib.error.HTTPError as error:
                print(error.code)
            except OSError as error:
                print(type(error).__name__)
        asking = http.client.HTTPConnection(root.removeprefix("http://"), timeout=20)
        asking.putrequest("POST", base.removeprefix(root) + "/chat/completions")
        asking.putheader("content-length", str(8 << 20))
        asking.endheaders()
        print(asking.getresponse().status)
        """
    )
    save = f"cat > /tmp/look.py <<'END'\n{look}\nEND\n"
    trajectory, sampler = play(tmp_path, ["python3 /tmp/look.py", "done"], command=f"{save}{COMMAND}")
    assert trajectory.status is Status.DONE
    (last,) = [request for request in sampler.inner.requests if request.id.endswith(":1")]
    shown = qwen_tokenizer().decode(sampler.contexts[last.id]).rpartition("<|im_start|>user\n")[2]
    assert shown.startswith("200\n404\n404\n401\nURLError\n200\n404\n404\n413\n"), shown
