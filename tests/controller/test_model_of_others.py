"""A third-party model through the whole loop: SFT in its format, RL with its calls, evaluation, export."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.agent import AgentSession, agent_format, core_registry
from etude.cli.served_model import open_checkpoint
from etude.config import AgentConfig, ModelConfig, RunConfig
from etude.controller.agent.models import ModelChoice, open_policy
from etude.controller.evaluation import EvaluationRequest, evaluate
from etude.controller.expert_chats import write_chats
from etude.controller.models import check_format
from etude.controller.sft import check_sft, fine_tune
from etude.controller.starting import check_start
from etude.errors import ConfigError
from etude.model import LanguageModel
from etude.model.huggingface import save_model
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.observer import SilentObserver
from etude.records import ToolCall, TrajectoryId
from etude.store.trajectories import TrajectoryLog
from etude.tokens import Tokenizer
from etude.tokens.chat.client_tools import call_arguments
from etude.tokens.grammar import HermesGrammar
from etude.tokens.pieces import spell
from etude.tokens.renderer import number_calls
from etude.training.checkpoints.exchange import convert_model
from etude_quickstart.corpus import load_sessions
from tests.controller.running import run_here, tiny_config
from tests.tokens.chat_models import GLM, GLM_MARKS, HEADERS, KIMI, KIMI_MARKS, TOLD, chat_tokenizer

CORE = core_registry().schemas
GENERATION = '{"eos_token_id": 257, "temperature": 0.6}'
ARCHITECTURE = ModelConfig(
    architecture="qwen3",
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=64,
    max_positions=4096,
)
AGENT = {"tools": "core", "max_turns": 2, "max_tokens": 2400, "max_message_tokens": 24}


def small_tokenizer(template: str = TOLD) -> Tokenizer:
    """One that tells the tools in few tokens."""
    texts = (spell(HermesGrammar(CORE).announce(CORE) or ()) * 4, "def tally(xs):\n    return sum(xs)\n" * 50)
    others = ("<|begin|>", "<|start|>", "<|header|>", "<|eot|>")
    marks = {GLM: GLM_MARKS, KIMI: KIMI_MARKS}.get(template, others)
    return chat_tokenizer(template, template == GLM, marks=marks, vocab_size=900, texts=texts)


def save_checkpoint(directory: Path, tokenizer: Tokenizer, num_rows: int | None = None) -> Path:
    model = LanguageModel(ARCHITECTURE, num_rows or tokenizer.vocab_size)
    model.initialise(0)
    save_model(model, directory)
    tokenizer.save(directory)
    (directory / "generation_config.json").write_text(GENERATION, encoding="utf-8")
    return directory


def run_config(tmp_path: Path, initial: Path, **sections: Any) -> RunConfig:
    agent = {**AGENT, **sections.pop("agent", {})}
    return tiny_config(tmp_path / "runs", agent=agent, initial_checkpoint=str(initial), **sections)


def write_expert_chats(directory: Path) -> Path:
    file = directory / "expert.jsonl"
    assert write_chats(load_sessions(24, SilentObserver()), file, AgentConfig(tools="core")) > 8
    return file


def check_kept(directory: Path, tokenizer: Tokenizer) -> None:
    """The checkpoint says how to speak to it, as the run did."""
    kept = Tokenizer.load(directory)
    agent = AgentConfig(tools="core")
    assert agent_format(kept, agent).digest == agent_format(tokenizer, agent).digest
    assert kept.chat_template and kept.chat_template == agent_format(tokenizer, agent).tokenizer.chat_template
    generation = json.loads((directory / "generation_config.json").read_text())
    ends = {GLM: ["<|user|>", "<|observation|>"], HEADERS: ["<|eot|>"]}.get(
        tokenizer.chat_template, ["<|im_end|>"]
    )
    assert generation == {"eos_token_id": [*map(kept.control_id, ends), 257], "temperature": 0.6}


@pytest.mark.slow
@pytest.mark.parametrize("template", [TOLD, HEADERS, GLM, KIMI])
def test_a_model_of_others_is_fine_tuned_trained_evaluated_and_exported(
    tmp_path: Path, template: str
) -> None:
    tokenizer = small_tokenizer(template)
    initial = save_checkpoint(tmp_path / "initial", tokenizer)
    sft = {
        "num_steps": 6,
        "tokens_per_step": 8192,
        "heldout_every_steps": 0,
        "optimizer": {"learning_rate": 0.01},
        "sources": {"expert": {"path": str(write_expert_chats(tmp_path)), "heldout_share": 0.2}},
    }
    config = run_config(tmp_path, initial, name="tuned", sft=sft)
    check_sft(config)
    tuned = RunDirectory.create(config)
    report = fine_tune(config, tuned, SilentObserver(), False)
    losses = [report[key]["expert"]["loss"] for key in ("heldout_before", "heldout_after")]
    assert losses[1] < 0.95 * losses[0]
    check_kept(tuned.checkpoints / "final", tokenizer)

    config = run_config(tmp_path, tuned.checkpoints / "final", name="trained")
    check_start(config)
    run, report = run_here(config)
    assert report["rl_steps"] == 2
    check_kept(run.checkpoints / "final", tokenizer)
    renderer = agent_format(tokenizer, AgentConfig(tools="core")).renderer()
    opening = renderer.opening(renderer.system)
    groups = list(TrajectoryLog(run.trajectories).read())
    segments = [segment for group in groups for member in group.members for segment in member.segments]
    assert segments and all(np.array_equal(one.tokens[: len(opening)], opening) for one in segments)
    assert {one.template_digest for one in segments} == {renderer.template_digest}
    parity = [
        row["parity_max"]
        for row in read_metrics(run.metrics_file)
        if row["kind"] == "rl" and "parity_max" in row
    ]
    assert all(value < 1e-3 for value in parity)

    result = evaluate(
        EvaluationRequest(str(run.path), num_tasks=2, out=tmp_path / "judged"), SilentObserver()
    )
    assert result.modes["greedy"].figures["tasks"] == 2
    convert_model(run.checkpoints / "final", tmp_path / "exported")
    check_kept(tmp_path / "exported", tokenizer)


@pytest.mark.parametrize("template", [TOLD, GLM, KIMI])
def test_an_experts_chat_is_what_a_session_with_the_same_calls_would_be(
    tmp_path: Path, template: str
) -> None:
    from etude.config import SessionsConfig
    from etude.controller.sessions import SessionReader

    chosen = agent_format(small_tokenizer(template), AgentConfig(tools="core"))
    renderer, sessions = chosen.renderer(), load_sessions(24, SilentObserver())
    source = SessionsConfig(path=str(write_expert_chats(tmp_path)))
    reader = SessionReader("expert", source, chosen.tokenizer, chosen.renderers, 0.0, 8192)
    documents = {document.tokens.tobytes(): document for document in reader.load()}
    found = 0
    for session in sessions:
        parts, count = [renderer.prompt(session.instruction)], 0
        for turn in session.turns:
            names = [part.name for part in turn.parts if isinstance(part, ToolCall)]
            parts.append(renderer.message(turn.parts, count))
            shown = renderer.observations(turn.outputs, number_calls(names, count))
            parts += [renderer.follow(parts[-1], shown)] if turn.outputs else []
            count += len(names)
        document = documents.get(np.concatenate(parts).tobytes())
        if document is not None:
            found += 1
            assert not document.agent[: len(parts[0])].any() and document.agent[len(parts[0])]
            assert document.agent.sum() == sum(map(len, parts[1::2]))
    assert found == len(documents) > 8


@pytest.mark.parametrize("template", [TOLD, HEADERS, GLM])
def test_serving_and_the_agent_speak_to_a_model_as_training_does(tmp_path: Path, template: str) -> None:
    tokenizer = small_tokenizer(template)
    initial = save_checkpoint(tmp_path / "model", tokenizer)
    trained = agent_format(tokenizer, AgentConfig(tools="core"))
    served = open_checkpoint(initial, None, ("auto", "auto"), None, 64).served
    assert served.renderers is not None and served.renderers.digest == trained.renderers().digest
    assert trained.renderer().end_tokens <= served.end_tokens

    async def prompt() -> np.ndarray:
        async with open_policy(ModelChoice(model=str(initial), tools="core"), True) as policy:
            assert policy.registry.schemas == CORE
            session = AgentSession("Hi", policy.renderer, TrajectoryId("r", "t", 0, 0, 0), policy.limits)
            return session.recording.tokens

    assert asyncio.run(prompt()).tobytes() == trained.renderer().prompt("Hi").tobytes()


def test_what_cannot_be_spoken_to_is_refused_before_a_run_has_a_directory(tmp_path: Path) -> None:
    def refused(name: str, template: str, match: str, num_rows: int | None = None, **agent: Any) -> None:
        tokenizer = small_tokenizer(template)
        initial = save_checkpoint(tmp_path / name, tokenizer, num_rows)
        config = run_config(tmp_path, initial, name=name, agent=agent)
        with pytest.raises(ConfigError, match=match):
            check_start(config)
        assert not (tmp_path / "runs").exists()

    refused(
        "unstable",
        TOLD.replace("message['role'] +", "message['role'] + loop.length | string +"),
        "message by",
    )
    refused("unended", TOLD.replace("im_end", "end_of_turn"), "not a control token")
    refused("broken", "{% for %}", "no Jinja template|not a Jinja template")
    refused("narrow", TOLD, "leaves no room", max_tokens=700)
    refused("long", TOLD, "rows", num_rows=300)
    refused("unknown", TOLD, "no such tool", tools="read_mind")
    bare = small_tokenizer("")
    initial = save_checkpoint(tmp_path / "bare", Tokenizer(bare._definition.replace("im_start", "open")))
    with pytest.raises(ConfigError, match="no chat template"):
        check_start(run_config(tmp_path, initial))
    with pytest.raises(ConfigError, match="mid-training teaches"):
        check_start(tiny_config(tmp_path / "runs", agent={"template": "chatml"}))
    with pytest.raises(ConfigError, match=r"agent\.system: mid-training"):
        check_start(tiny_config(tmp_path / "runs", agent={"system": "Be careful."}))
    own_family = {"family": "mine:Family"}
    check_format(
        tiny_config(tmp_path / "runs", agent={"system": "Look.", "index": "words"}, tasks=own_family)
    )


def test_an_experts_chats_have_the_words_and_call_the_tools_of_the_section_agent(
    tmp_path: Path,
) -> None:
    agent = AgentConfig(tools="list_dir,read_file,edit_lines,run_tests,finish", system="Find the bug.")
    sessions, rows = load_sessions(60, SilentObserver()), {}
    for flawless in (False, True):
        count = write_chats(sessions, tmp_path / "chats.jsonl", agent, flawless=flawless)
        lines = (tmp_path / "chats.jsonl").read_text().splitlines()
        rows[flawless] = [json.loads(line)["messages"] for line in lines]
        assert len(lines) == count
    assert 0 < len(rows[True]) < len(rows[False]) < len(sessions)
    assert all(row in rows[False] for row in rows[True])
    calls = [
        call["function"]["name"] for row in rows[False] for one in row for call in one.get("tool_calls", [])
    ]
    assert set(calls) == set(agent.tools.split(","))
    assert {row[0]["content"] for row in rows[False]} == {"Find the bug."}
    for row in rows[True]:
        outputs = [one["content"] for one in row if one["role"] == "tool"]
        assert not any(output.startswith(("FAIL", "ERROR")) for output in outputs)
        assert sum(output.endswith(" passed") for output in outputs) == 1


def test_arguments_of_an_experts_calls_have_the_types_of_their_tools(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in write_expert_chats(tmp_path).read_text().splitlines()]
    calls = [
        call["function"] for row in rows for one in row["messages"] for call in one.get("tool_calls", [])
    ]
    edits = [json.loads(call["arguments"]) for call in calls if call["name"] == "edit_lines"]
    assert edits and all(isinstance(one["start"], int) for one in edits)
    assert call_arguments.__doc__ and {call["name"] for call in calls} <= {schema.name for schema in CORE}


def test_chats_that_no_session_can_be_written_as_are_refused_and_leave_the_file(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("kept")
    with pytest.raises(ConfigError, match=r"agent\.tools: none of 24 sessions .*list_dir"):
        write_chats(load_sessions(24, SilentObserver()), file, AgentConfig(tools="read_file,finish"))
    assert file.read_text() == "kept"
