"""docs/algorithms.md: its settings load, its program runs, and it names every key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from etude.algorithms.baselines import BASELINES
from etude.algorithms.normalizers import NORMALIZERS
from etude.config import CorrectionConfig, FeedbackConfig, LossConfig, RlConfig, StreamConfig, parse_config
from etude.training.feedback import Unhinted
from etude.training.intake import Skipped
from etude.training.stream import PassedOver

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(language: str) -> list[str]:
    return [found[2] for found in BLOCK.finditer(PAGE) if found[1] == language]


@pytest.mark.parametrize("block", _blocks("toml"))
def test_every_setting_loads(block: str) -> None:
    parse_config(tomllib.loads(block))


def test_the_first_settings_are_the_defaults() -> None:
    assert parse_config(tomllib.loads(_blocks("toml")[0])).rl == RlConfig()


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = _blocks("python")
    exec(compile(block, "docs/algorithms.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[False, False, True]")


@pytest.mark.parametrize(
    "section",
    [LossConfig, CorrectionConfig, FeedbackConfig, StreamConfig],
    ids=lambda section: section.__name__,
)
def test_every_key_is_named(section: type) -> None:
    fields = getattr(section, "model_fields")  # noqa: B009
    missing = [name for name in fields if name not in PAGE and name != "balance_weight"]
    assert not missing


def test_every_choice_and_every_reason_is_named() -> None:
    names = [
        *BASELINES,
        *NORMALIZERS,
        "clip",
        "cispo",
        "gspo",
        "decoupled",
        "k1",
        "k2",
        "k3",
        "r3",
        "r2",
        "off",
    ]
    names += [str(reason) for reason in Skipped]
    names += [f"passed_{reason}" for reason in PassedOver] + [f"unhinted_{reason}" for reason in Unhinted]
    assert [name for name in names if f"`{name}`" not in PAGE] == []
