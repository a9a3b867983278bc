"""Fill-in-the-middle: no text is lost or added, wherever it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.tokens.training import END_TOKEN, train_tokenizer
from etude.training.pretraining.infilling import OWN_SENTINELS, Infilling
from tests.training.pretraining.builders import TEXTS, tiny_tokenizer


@given(
    text=st.text(max_size=80) | st.sampled_from(TEXTS),
    seed=st.integers(0, 99),
    spm=st.sampled_from([0.0, 1.0]),
)
def test_the_parts_are_the_document(text: str, seed: int, spm: float) -> None:
    tokenizer = tiny_tokenizer()
    end = tokenizer.control_id(END_TOKEN)
    tokens = np.append(tokenizer.encode(text), np.int32(end)).astype(np.int32)
    turned = Infilling.of(tokenizer).rearrange(tokens, end, spm, np.random.default_rng(seed))
    if turned is None:
        assert len(text) < 3
        return
    prefix, suffix, middle = (tokenizer.control_id(name) for name in OWN_SENTINELS)
    assert turned[0] == prefix and turned[-1] == end
    assert sorted(t for t in turned.tolist() if t in (prefix, suffix, middle)) == sorted(
        (prefix, suffix, middle)
    )
    at_suffix, at_middle = turned.tolist().index(suffix), turned.tolist().index(middle)
    after = tokenizer.decode(turned[at_suffix + 1 : at_middle])
    rest = tokenizer.decode(turned[at_middle + 1 : -1])
    before = tokenizer.decode(turned[1:at_suffix])
    assert (rest + after if spm else before + rest + after) == text
    assert before == "" or not spm


def test_the_middle_is_marked_with_its_end() -> None:
    tokenizer = tiny_tokenizer()
    infilling = Infilling.of(tokenizer)
    tokens = np.array([infilling.prefix, 5, infilling.suffix, 6, infilling.middle, 7, 8], dtype=np.int32)
    assert infilling.middles(tokens).tolist() == [False] * 5 + [True, True]


def test_a_tokenizer_without_the_marks_is_refused() -> None:
    tokenizer = train_tokenizer(TEXTS, 300, [END_TOKEN])
    assert Infilling.find(tokenizer) is None
    with pytest.raises(ConfigError, match="fill-in-the-middle"):
        Infilling.of(tokenizer)
