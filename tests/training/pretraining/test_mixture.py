"""Mixtures: shares by weight, every token accounted for, resumed bit for bit, full steps."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import CheckpointError, ConfigError
from etude.training.pretraining.documents import Document
from etude.training.pretraining.mixture import Mixture
from etude.training.pretraining.sources import cut
from tests.training.pretraining.builders import token_source

LENGTHS = [5, 40, 90, 17, 33, 64, 8, 21, 12, 50]


@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=12),
    window=st.integers(2, 40),
)
def test_pieces_hold_every_target_exactly_once(lengths: list[int], window: int) -> None:
    pieces = cut(np.arange(len(lengths)), np.array(lengths), window)
    targets = [
        (document, place) for document, begin, end in pieces.tolist() for place in range(begin + 1, end)
    ]
    assert sorted(targets) == [(d, place) for d, length in enumerate(lengths) for place in range(1, length)]
    assert all(2 <= end - begin <= window for _, begin, end in pieces.tolist())


def test_sources_come_by_weight_and_one_of_weight_zero_never(tmp_path: Path) -> None:
    sources = [
        token_source(tmp_path, LENGTHS, "a", weight=3.0),
        token_source(tmp_path, LENGTHS, "b", weight=1.0),
        token_source(tmp_path, LENGTHS, "never", weight=0.0),
    ]
    mixture = Mixture(sources, 128, 512, 32, seed=0)
    for _ in range(60):
        mixture.draw()
    shares = mixture.figures()
    assert shares["share/a"] == pytest.approx(0.75, abs=0.01)
    assert "share/never" not in shares
    assert mixture.accounts()["a"].tokens / mixture.accounts()["b"].tokens == pytest.approx(3.0, rel=0.1)


@given(steps=st.integers(0, 30), seed=st.integers(0, 5), pool=st.integers(0, 600))
def test_what_was_seen_is_what_was_drawn(steps: int, seed: int, pool: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        source = token_source(Path(directory), LENGTHS)
        mixture = Mixture([source], 100, pool, 32, seed)
        drawn = [document for _ in range(steps) for document in mixture.draw()]
        seen = mixture.seen_tokens("code")
        assert seen.sum() == sum(len(document.tokens) - 1 for document in drawn)
        lengths = np.array(LENGTHS) - 1
        epochs = seen / lengths
        assert epochs.max() - epochs.min() <= 2, "nobody is two passes ahead"
        assert sum(mixture.accounts()["code"].times_seen.values()) == len(LENGTHS)


@pytest.mark.slow
@given(before=st.integers(0, 12), after=st.integers(1, 12), widen=st.booleans())
def test_a_resumed_mixture_draws_the_same(before: int, after: int, widen: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        sources = [token_source(Path(directory), LENGTHS, name) for name in ("a", "b")]
        straight, first, second = (Mixture(sources, 100, 300, 24, seed=1) for _ in range(3))
        for _ in range(before):
            straight.draw(), first.draw()
        if widen:
            straight.set_window(48), first.set_window(48)
        second.load_state_dict(first.state_dict())
        for _ in range(after):
            assert _tokens(second.draw()) == _tokens(straight.draw())
        assert second.state_dict() == straight.state_dict()
        assert second.accounts() == straight.accounts()


def _tokens(documents: list[Document]) -> list[list[int]]:
    return [document.tokens.tolist() for document in documents]


def test_steps_are_full_and_never_too_long(tmp_path: Path) -> None:
    mixture = Mixture([token_source(tmp_path, LENGTHS)], 256, 2048, 64, seed=0)
    fills = []
    for _ in range(40):
        assert sum(len(document.tokens) for document in mixture.draw()) <= 256
        fills.append(mixture.figures()["fill"])
    assert np.mean(fills) > 0.97


def test_a_piece_longer_than_a_step_comes_alone(tmp_path: Path) -> None:
    mixture = Mixture([token_source(tmp_path, [100, 100])], 64, 0, 128, seed=0)
    assert [len(document.tokens) for document in mixture.draw()] == [100]


def test_a_source_that_runs_out_leaves_its_share_to_the_others(tmp_path: Path) -> None:
    sources = [token_source(tmp_path, LENGTHS, "a", max_epochs=1), token_source(tmp_path, LENGTHS, "b")]
    mixture = Mixture(sources, 100, 200, 64, seed=0)
    for _ in range(40):
        assert mixture.draw()
    assert mixture.accounts()["a"].times_seen == {1: len(LENGTHS)}
    assert not mixture.exhausted


def test_a_mixture_ends_when_every_source_has_run_out(tmp_path: Path) -> None:
    mixture = Mixture([token_source(tmp_path, LENGTHS, max_epochs=2)], 100, 200, 64, seed=0)
    drawn = 0
    while not mixture.exhausted:
        drawn += sum(len(document.tokens) - 1 for document in mixture.draw())
    assert drawn == 2 * (sum(LENGTHS) - len(LENGTHS))
    assert mixture.draw() == []
    assert mixture.accounts()["code"].times_seen == {2: len(LENGTHS)}


def test_other_documents_are_refused_on_resume(tmp_path: Path) -> None:
    state = Mixture([token_source(tmp_path, LENGTHS)], 100, 200, 64, seed=0).state_dict()
    other = Mixture([token_source(tmp_path, [*LENGTHS, 9])], 100, 200, 64, seed=0)
    with pytest.raises(CheckpointError, match="differ from those"):
        other.load_state_dict(state)


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Mixture([token_source(tmp_path, LENGTHS, weight=0.0)], 100, 200, 64, seed=0)
    with pytest.raises(ConfigError, match="nothing to train on"):
        Mixture([token_source(tmp_path, [1])], 100, 200, 64, seed=0)
