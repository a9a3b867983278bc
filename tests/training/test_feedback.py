"""Textual feedback: teacher and student, the trained tokens, and that it helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from etude.config import FeedbackConfig
from etude.errors import ConfigError
from etude.model import LanguageModel, PackedAttention
from etude.model.scoring import score_sequences
from etude.records import (
    Group,
    Status,
    ToolCall,
    ToolErrorClass,
    ToolResult,
    Trajectory,
    Turn,
    TurnSpan,
)
from etude.tokens import ETUDE_TEMPLATE, Renderer, train_tokenizer
from etude.tokens.grammar import XmlGrammar
from etude.training import RlTrainer
from etude.training.feedback import (
    HINTED_ERRORS,
    Feedback,
    FeedbackExample,
    FindHints,
    Unhinted,
    feedback_divergence,
    open_feedback,
    tool_error_hints,
)
from etude.weights import MemoryWeights
from tests.model.builders import small_config
from tests.training.builders import Rollouts, as_group, rl_config
from tests.training.test_rl import assert_equal_gradients, gradients_of_step

CONFIG = FeedbackConfig(weight=1.0)


def _make_renderer() -> Renderer:
    grammar = XmlGrammar(())
    names = [*ETUDE_TEMPLATE.control_tokens, *grammar.control_tokens()]
    return Renderer(train_tokenizer(["read the file, then edit it"] * 4, 300, names), grammar)


RENDERER = _make_renderer()


def _model(seed: int = 0) -> LanguageModel:
    model = LanguageModel(small_config(max_positions=256), RENDERER.tokenizer.vocab_size)
    model.initialise(seed)
    return model


def saying(*hints: str) -> FindHints:
    """Says the given words about the first turns."""
    return lambda trajectory: dict(enumerate(hints)) if trajectory.turns else {}


def _session(rollouts: Rollouts, reward: float = 0.0, words: str = "mend it", **turn: Any) -> Trajectory:
    """prompt | message (faulty) | results | message; all messages are sampled."""
    parts = [
        RENDERER.prompt(words),
        RENDERER.message(["read nothing"]),
        RENDERER.observations(["no such tool"]),
        RENDERER.message(["read the file"]),
    ]
    tokens = np.concatenate(parts)
    ends = np.cumsum([len(part) for part in parts])
    sampled = np.zeros(len(tokens), dtype=np.bool_)
    sampled[ends[0] : ends[1]] = sampled[ends[2] :] = True
    logprobs = np.where(sampled, score_sequences(rollouts.model, [tokens])[0], 0.0).astype(np.float32)
    member = rollouts.member(
        reward,
        len(tokens),
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        routes=None,
        turn_spans=(TurnSpan(int(ends[0]), int(ends[1]), "assistant"),),
    )
    name = member.segments[0].id
    call = ToolCall("read", {}, error=None)
    result = ToolResult("no such tool", ToolErrorClass.INVALID_ARGUMENTS)
    fields: dict[str, Any] = {"calls": (call,), "results": (result,)} | turn
    first = Turn(name, int(ends[0]), int(ends[1]), "read nothing", **fields)
    second = Turn(name, int(ends[2]), int(ends[3]), "read the file", (call,), (ToolResult("text"),))
    return replace(member, turns=(first, second))


def _example(text: str = "There is no such tool.") -> tuple[FeedbackExample, Trajectory]:
    session = _session(Rollouts(_model()))
    feedback = Feedback(saying(text), RENDERER, CONFIG)
    ((example,),), _ = feedback.examples([as_group([session])], 256)
    return example, session


def test_the_hint_stands_before_the_message_and_the_message_keeps_its_tokens() -> None:
    example, session = _example()
    (segment,) = session.segments
    turn = session.turns[0]
    message = segment.tokens[turn.start : turn.end]
    np.testing.assert_array_equal(example.student, segment.tokens[: turn.end])
    np.testing.assert_array_equal(example.teacher[-len(message) :], message)
    expected = np.concatenate(
        [
            segment.tokens[: turn.start - 1],
            RENDERER.user_message("There is no such tool."),
            message,
        ]
    )
    np.testing.assert_array_equal(example.teacher, expected)
    text = RENDERER.tokenizer.decode(example.teacher)
    assert "mend it<|end|><|user|>There is no such tool.<|end|><|assistant|>read nothing" in text
    assert example.taught.all() and example.num_tokens == len(message)


def _divergence_written_out(model: LanguageModel, example: FeedbackExample) -> float:
    """In double precision, token by token, each side by itself."""

    def distribution(tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens.astype(np.int64))
        hidden = model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
        return model.logits(hidden).double().log_softmax(-1).detach().numpy()

    told, learned = distribution(example.teacher), distribution(example.student)
    total, length = 0.0, len(example.taught)
    for place in np.flatnonzero(example.taught):
        p = told[len(told) - length + place - 1]
        q = learned[len(learned) - length + place - 1]
        total += float((np.exp(p) * (p - q)).sum())
    return total


def test_the_divergence_is_its_formula_on_the_turns_sampled_tokens_alone() -> None:
    model = _model()
    first, _ = _example()
    second, _ = _example("Read the file first, it is there.")
    half = replace(second, taught=second.taught & (np.arange(len(second.taught)) % 2 == 0))
    for examples in ([first], [second], [first, half], [half, first, second]):
        expected = sum(_divergence_written_out(model, example) for example in examples)
        assert float(feedback_divergence(model, examples, 1.0).detach()) == pytest.approx(expected, rel=1e-4)
        assert expected > 1e-4


def test_only_the_student_learns() -> None:
    """The gradient is that of a teacher held fixed: the cross entropy's."""
    example, _ = _example()
    model, fixed = _model(), _model()
    feedback_divergence(model, [example], 1.0).backward()
    ids, told = (torch.from_numpy(t.astype(np.int64)) for t in (example.student, example.teacher))
    length = len(example.taught)
    with torch.no_grad():
        hidden = fixed(told, torch.arange(len(told)), PackedAttention([len(told)]))
        target = fixed.logits(hidden[-length - 1 : -1]).softmax(-1)
    hidden = fixed(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
    (-(target * fixed.logits(hidden[-length - 1 : -1]).log_softmax(-1)).sum()).backward()
    ours, theirs = (
        {name: p.grad for name, p in one.named_parameters() if p.grad is not None} for one in (model, fixed)
    )
    assert_equal_gradients(ours, theirs)


def _trainer(rollouts: Rollouts, feedback: Feedback | None, **changes: Any) -> RlTrainer:
    weight, rate = changes.pop("weight", 1.0), changes.pop("rate", 2e-3)
    config = rl_config(
        optimizer={"learning_rate": rate}, router_replay="off", feedback={"weight": weight}, **changes
    )
    return RlTrainer(_model(), config, "run", MemoryWeights(), rollouts.blobs.get, feedback=feedback)


def _told(text: str = "There is no such tool.") -> Feedback:
    return Feedback(saying(text), RENDERER, CONFIG)


def test_training_pulls_the_policy_without_the_hint_to_the_one_with_it() -> None:
    """Equal rewards: nothing but the feedback moves the weights."""
    rollouts = Rollouts(_model())
    group = as_group([_session(rollouts), _session(rollouts)])
    trainer = _trainer(rollouts, _told())
    first = trainer.step([group])
    assert first["feedback_tokens"] == 2 * _example()[0].num_tokens
    for _ in range(11):
        trainer.step([group])
    last = trainer.step([group])
    assert last["feedback_kl"] < 0.3 * first["feedback_kl"]


def test_a_step_brings_the_policy_nearer_to_the_teacher_that_it_had() -> None:
    """The hinted policy moves as well, for the weights are the same; so the first one is the measure."""
    rollouts = Rollouts(_model())
    trainer = _trainer(rollouts, _told(), rate=1e-4)
    for _ in range(3):
        trainer.step([as_group([_session(rollouts), _session(rollouts)])])
    example, _ = _example()
    before, after = (_student_to_first_teacher(model, example) for model in (_model(), trainer.model))
    assert after < 0.95 * before


@torch.no_grad()
def _student_to_first_teacher(model: LanguageModel, example: FeedbackExample) -> float:
    """KL from the hinted policy of the beginning to the present policy without the hint."""
    length = len(example.taught)

    def states(of: LanguageModel, tokens: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(tokens.astype(np.int64))
        hidden = of(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
        return of.logits(hidden[-length - 1 : -1]).log_softmax(-1)

    told, learned = states(_model(), example.teacher), states(model, example.student)
    return float((told.exp() * (told - learned)).sum())


def test_with_weight_0_a_step_is_the_step_without_feedback() -> None:
    rollouts = Rollouts(_model())
    group = as_group([_session(rollouts, 1.0), _session(rollouts, 0.0, "edit the file")])
    plain = gradients_of_step(_trainer(rollouts, None, weight=0.0), [group])
    off = gradients_of_step(_trainer(rollouts, _told(), weight=0.0), [group])
    on = gradients_of_step(_trainer(rollouts, _told()), [group])
    assert_equal_gradients(off, plain)
    name = "blocks.0.qkv"
    assert (on[name] - plain[name]).abs().max() > 1e-5


@pytest.mark.parametrize("micro_batch_tokens", [1, 60])
def test_micro_batches_do_not_change_what_is_taught(micro_batch_tokens: int) -> None:
    rollouts = Rollouts(_model())
    groups: list[Group] = [as_group([_session(rollouts) for _ in range(3)]) for _ in range(2)]
    whole = gradients_of_step(_trainer(rollouts, _told()), groups)
    cut = _trainer(rollouts, _told(), micro_batch_tokens=micro_batch_tokens)
    assert_equal_gradients(gradients_of_step(cut, groups), whole)


def test_a_weight_without_feedback_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        _trainer(Rollouts(_model()), None)
    assert caught.value.field == "rl.feedback.weight"
    assert open_feedback(FeedbackConfig(), RENDERER) is None


def _unhinted(session: Trajectory, max_positions: int = 256) -> dict[Unhinted, int]:
    examples, counts = _told().examples([as_group([session])], max_positions)
    assert examples == [[]]
    return dict(counts)


def test_what_cannot_be_taught_is_counted_by_reason() -> None:
    session = _session(Rollouts(_model()))
    turn, (segment,) = session.turns[0], session.segments
    assert _unhinted(session, 10) == {Unhinted.TOO_LONG: 1}
    inside = replace(turn, start=turn.start + 1)
    assert _unhinted(replace(session, turns=(inside,))) == {Unhinted.FRAME: 1}
    given = replace(segment, sampled=np.zeros(len(segment.tokens), dtype=np.bool_))
    assert _unhinted(replace(session, segments=(given,))) == {Unhinted.UNSAMPLED: 1}
    rollouts = Rollouts(_model())
    lengthy = Feedback(saying("word " * 300), RENDERER, CONFIG)
    metrics = _trainer(rollouts, lengthy).step([as_group([_session(rollouts), _session(rollouts)])])
    assert metrics["unhinted_too_long"] == 2


def test_infrastructure_failures_teach_nothing() -> None:
    session = replace(_session(Rollouts(_model())), status=Status.INFRASTRUCTURE)
    examples, counts = _told().examples([as_group([session])], 256)
    assert examples == [[]] and not counts


def _hints(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[str]:
    session = _session(Rollouts(_model()), calls=tuple(calls), results=tuple(results))
    return list(tool_error_hints(session).values())


def test_hints_come_from_malformed_calls_and_errors_of_the_agents_making() -> None:
    good, bad = ToolCall("read", {"path": "a"}), ToolCall("", error="no closing tag")
    failing = [ToolResult("no file\n  a", error) for error in HINTED_ERRORS]
    assert _hints([good], [ToolResult("text")]) == []
    for error in (ToolErrorClass.PROVIDER, ToolErrorClass.USER_ABORTED):
        assert _hints([good], [ToolResult("down", error)]) == []
    (hint,) = _hints([bad], [ToolResult("malformed", ToolErrorClass.MALFORMED)])
    assert hint == "A call would be malformed: no closing tag"
    for result in failing:
        (hint,) = _hints([good], [result])
        assert hint == f"read would fail ({result.error}): no file a"
    (hint,) = _hints([bad, good, good], [ToolResult("x", ToolErrorClass.MALFORMED), failing[0], failing[0]])
    assert len(hint.split("\n")) == 2, "each fault once"
    (hint,) = _hints([good], [ToolResult("y" * 1000, ToolErrorClass.TIMEOUT)])
    assert len(hint) < 300
    assert _hints([good, good], [ToolResult("text")]) == [], "a call that was never answered is no fault"


def test_no_more_hints_are_taught_than_the_configuration_allows() -> None:
    session = _session(Rollouts(_model()))
    hints = saying("first", "second")
    for most in (1, 2):
        config = FeedbackConfig(weight=1.0, max_hints_per_trajectory=most)
        ((*examples,),), _ = Feedback(hints, RENDERER, config).examples([as_group([session])], 256)
        assert len(examples) == most
