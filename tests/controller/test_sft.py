"""Fine-tuning on sessions: tokens as recorded, only the agent's counted, messages as in a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.config import ModelConfig, RunConfig, SessionsConfig, parse_config
from etude.controller.corpora import session_control_tokens
from etude.controller.sessions import SessionReader, atif_messages, split_heldout
from etude.controller.sft import check_sft, fine_tune
from etude.errors import ConfigError
from etude.model import build_model
from etude.observe import RunDirectory, SilentObserver, read_metrics
from etude.records import RewardBreakdown
from etude.store import TrajectoryLog, trajectory_to_atif
from etude.tokens.chat_format import choose_format
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer
from etude.training import Document, save_checkpoint
from tests.controller.test_pretraining import MODEL, TEXTS
from tests.model.builders import small_model
from tests.tokens.chat_models import glm_tokenizer
from tests.training.builders import Rollouts, as_group

CHAT = [
    {"role": "user", "content": "add three"},
    {"role": "assistant", "content": "def add_3(left, right):"},
    {"role": "user", "content": "and four"},
    {"role": "assistant", "content": "def add_4(left, right):"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 400, session_control_tokens())


def _reader(
    tokenizer: Tokenizer, source: Path | SessionsConfig, weight: float = 0.0, window: int = 64
) -> SessionReader:
    source = SessionsConfig(path=str(source)) if isinstance(source, Path) else source
    return SessionReader("own", source, tokenizer, choose_format(tokenizer).renderers, weight, window)


def _write_chats(path: Path, chats: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    return path


def _write_log(path: Path, tokenizer: Tokenizer, rewards: list[float | None], **changes: Any) -> Rollouts:
    rollouts = Rollouts(small_model(0))
    changes = {"tokenizer_digest": tokenizer.digest} | changes
    members = [
        rollouts.member(None if reward is None else RewardBreakdown(reward), 20 + index, **changes)
        for index, reward in enumerate(rewards)
    ]
    TrajectoryLog(path).append([as_group(members)])
    return rollouts


def test_recorded_tokens_are_taken_as_they_were(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _write_log(tmp_path / "run" / "trajectories", tokenizer, [1.0, 0.0, None])
    documents = _reader(tokenizer, tmp_path / "run", 0.25).load()
    stored = [t for g in TrajectoryLog(tmp_path / "run" / "trajectories").read() for t in g.members]
    assert len(documents) == 3
    for document, trajectory in zip(documents, stored, strict=True):
        segment = trajectory.segments[0]
        assert np.array_equal(document.tokens, segment.tokens)
        assert np.array_equal(document.agent, segment.sampled)
        assert np.array_equal(document.weights, np.where(segment.sampled, 1.0, 0.25).astype(np.float32))


def test_sessions_of_low_reward_or_too_long_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    _write_log(tmp_path / "log", tokenizer, [1.0, 0.0, None, 1.0])
    source = SessionsConfig(path=str(tmp_path / "log"), min_reward=0.5)
    reader = _reader(tokenizer, source, window=20)
    assert len(reader.load()) == 1
    assert reader.skipped == {"reward under min_reward": 2, "longer than the window": 1}


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _write_log(tmp_path / "log", tokenizer, [1.0], tokenizer_digest="another")
    with pytest.raises(ConfigError, match="another tokenizer"):
        _reader(tokenizer, tmp_path / "log").load()


def test_messages_have_the_tokens_of_a_rollout_and_only_answers_count(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = _write_chats(tmp_path / "chats.jsonl", [CHAT])
    (document,) = _reader(tokenizer, path).load()
    renderer = choose_format(tokenizer).renderers().find(_no_tools())
    expected = [
        renderer.prompt("add three"),
        renderer.message(["def add_3(left, right):"]),
        renderer.user_message("and four"),
        renderer.message(["def add_4(left, right):"]),
    ]
    assert document.tokens.tolist() == np.concatenate(expected).tolist()
    written = np.repeat([False, True, False, True], [len(part) for part in expected])
    assert document.agent.tolist() == written.tolist()
    assert document.weights.tolist() == written.astype(float).tolist()


def test_an_opener_that_ends_an_answer_stands_once_and_is_learnt(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": {}}}
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a.py"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "So?"},
    ]
    path = _write_chats(tmp_path / "chats.jsonl", [chat])
    (document,) = _reader(glm_tokenizer(), path, window=512).load()
    learnt = [
        glm_tokenizer().decode(document.tokens[[place]]) for place in np.flatnonzero(document.agent).tolist()
    ]
    assert "".join(learnt) == (
        "\n<think></think>\n<tool_call>ls\n</tool_call><|observation|>\n<think></think>\nYes.<|user|>"
    )
    assert glm_tokenizer().decode(document.tokens) == (
        "<sop><|user|>\nHi<|assistant|>\n<think></think>\n<tool_call>ls\n</tool_call><|observation|>"
        "\n<tool_response>\na.py\n</tool_response><|assistant|>\n<think></think>\nYes.<|user|>\nSo?"
    )


def _chat_with_call(name: str, arguments: object) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool = {"name": "ls", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
    return {"messages": messages, "tools": [{"type": "function", "function": tool}]}


def test_sessions_with_calls_that_could_not_be_made_are_left_out_and_counted(tmp_path: Path) -> None:
    path, good = tmp_path / "chats.jsonl", _chat_with_call("ls", '{"path": "."}')
    unlisted = _chat_with_call("cat", '{"path": "."}')
    chats = [good, _chat_with_call("ls", '{"path": '), _chat_with_call("ls", "[1]"), unlisted]
    chats.append(unlisted | {"tools": []})
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    reader = _reader(glm_tokenizer(), path, window=2048)
    assert len(reader.load()) == 2, "a chat that lists no tools may call any"
    assert reader.skipped == {
        "the arguments of a call of ls are no JSON object": 2,
        "a call of cat, which is not among the tools of the chat": 1,
    }


def _no_tools() -> Any:
    from etude.tokens.chat.messages import Opening

    return Opening()


def test_atif_files_give_their_tokens_where_they_have_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _write_log(tmp_path / "log", tokenizer, [1.0])
    (group,) = TrajectoryLog(tmp_path / "log").read()
    document = trajectory_to_atif(group.members[0])
    (tmp_path / "one.json").write_text(json.dumps(document), encoding="utf-8")
    (loaded,) = _reader(tokenizer, tmp_path / "one.json").load()
    assert np.array_equal(loaded.tokens, group.members[0].segments[0].tokens)


def test_atif_files_without_tokens_are_rendered(tmp_path: Path, tokenizer: Tokenizer) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "add three"},
        {"step_id": 2, "source": "agent", "message": "def add_3(left, right):"},
    ]
    document = {
        "schema_version": "ATIF-v1.5",
        "session_id": "s",
        "agent": {"name": "other", "version": "1", "model_name": "m"},
        "steps": steps,
    }
    (tmp_path / "one.json").write_text(json.dumps(document), encoding="utf-8")
    (loaded,) = _reader(tokenizer, tmp_path / "one.json").load()
    renderer = choose_format(tokenizer).renderers().find(_no_tools())
    assert loaded.tokens.tolist() == [
        *renderer.prompt("add three"),
        *renderer.message(["def add_3(left, right):"]),
    ]


def test_sessions_that_are_all_too_long_are_said_to_be(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _write_log(tmp_path / "log", tokenizer, [1.0])
    with pytest.raises(ConfigError, match="longer window than 8 tokens"):
        _reader(tokenizer, tmp_path / "log", window=8).load()


@pytest.mark.parametrize(
    ("text", "reason"), [("[]", "not a JSON object"), ("{}", "schema_version"), ("{", "JSON")]
)
def test_a_json_file_that_is_no_atif_is_named_with_its_source_as_a_mistake(
    tmp_path: Path, tokenizer: Tokenizer, text: str, reason: str
) -> None:
    (tmp_path / "chats.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"source own: .*chats\.json.*{reason}.*\.jsonl"):
        _reader(tokenizer, tmp_path / "chats.json").load()


def test_calls_and_results_of_atif_become_messages() -> None:
    call = {"tool_call_id": "c1", "function_name": "read", "arguments": {"path": "a"}}
    steps = [
        {"source": "user", "message": "look"},
        {
            "source": "agent",
            "message": "",
            "tool_calls": [call],
            "observation": {"results": [{"source_call_id": "c1", "content": "text"}]},
        },
    ]
    user, answer, result = atif_messages({"steps": steps})
    assert user == {"role": "user", "content": "look"}
    assert answer["tool_calls"][0]["function"] == {"name": "read", "arguments": '{"path": "a"}'}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "text"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not a valid chat"),
        ('{"text": "x"}', "is not a valid chat"),
        ('{"messages": [{"role": "robot"}]}', "role"),
        ('{"messages": []}', "no messages"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no sessions to train on"),
    ],
)
def test_bad_chats_are_refused(tmp_path: Path, tokenizer: Tokenizer, line: str, message: str) -> None:
    (tmp_path / "chats.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        _reader(tokenizer, tmp_path / "chats.jsonl").load()


def test_copies_are_held_out_together() -> None:
    documents = [Document.plain(np.array([1, number % 20], dtype=np.int32)) for number in range(40)]
    kept, held = split_heldout(documents, 0.3)
    assert len(kept) + len(held) == 40 and held
    assert not {tuple(d.tokens) for d in kept} & {tuple(d.tokens) for d in held}
    assert split_heldout(documents[:1], 0.999)[0]


def _config(directory: Path, tokenizer: Tokenizer, **changes: Any) -> RunConfig:
    model = build_model(ModelConfig.model_validate(MODEL), tokenizer.vocab_size)
    model.initialise(0)
    save_checkpoint(directory / "model", model, write_more=tokenizer.save)
    chats = [
        [
            {"role": "user", "content": f"add {number}"},
            {"role": "assistant", "content": f"def add_{number}(left, right):"},
        ]
        for number in range(30)
    ]
    path = _write_chats(directory / "chats.jsonl", chats)
    section: dict[str, Any] = {"num_steps": 12, "tokens_per_step": 256, "pool_tokens": 256}
    section["heldout_every_steps"] = 0
    section["sources"] = {"own": {"path": str(path), "heldout_share": 0.2}}
    section["optimizer"] = {"learning_rate": 0.01}
    return parse_config(
        {
            "name": "tuned",
            "runs_directory": str(directory / "runs"),
            "initial_checkpoint": str(directory / "model"),
            "num_threads": 1,
            "agent": {"max_tokens": 64, "max_message_tokens": 16},
            "sft": section | changes,
        }
    )


def test_fine_tuning_lowers_the_held_out_loss_on_what_agents_write(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = _config(tmp_path, tokenizer)
    check_sft(config)
    report = fine_tune(config, RunDirectory.create(config), SilentObserver(), False)
    assert report["heldout_after"]["own"]["loss"] < 0.8 * report["heldout_before"]["own"]["loss"]
    assert report["sources"]["own"]["documents"] + 1 < 30, "some are held out"


def test_a_held_out_loss_that_is_no_number_ends_no_run(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """That of texts to learn from, in which no agent wrote anything."""
    texts = _write_chats(
        tmp_path / "texts.jsonl", [[{"role": "user", "content": f"add {number}"}] for number in range(30)]
    )
    sources = {"texts": {"path": str(texts), "heldout_share": 0.2}}
    config = _config(tmp_path, tokenizer, sources=sources, observation_weight=0.5)
    run = RunDirectory.create(config)
    report = fine_tune(config, run, SilentObserver(), False)
    assert report["steps"] == 12 and report["heldout_after"] == {"texts": {}}
    assert run.read_json(run.report_file) == {**report, "complete": True}
    assert "nan" in [row["loss"] for row in read_metrics(run.metrics_file) if row["kind"] == "heldout"]


def test_a_model_and_sources_must_be_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="initial_checkpoint"):
        check_sft(RunConfig())
    with pytest.raises(ConfigError, match="sources"):
        check_sft(_config(tmp_path, tokenizer, sources={}))
