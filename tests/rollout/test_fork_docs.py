"""The keys of docs/forks.md are those of the configuration."""

import re
import tomllib
from pathlib import Path

from etude.config import RlConfig
from etude.environment.fork_groups import ForkRefusal

DOCUMENT = (Path(__file__).parents[2] / "docs" / "forks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def test_the_keys_of_the_document_are_those_of_the_configuration() -> None:
    (text,) = blocks("toml")
    config = RlConfig.model_validate(tomllib.loads(text)["rl"])
    assert config.forks.share == 0.5
    assert config.forks.size == RlConfig().forks.size, "but for the share they are the defaults"
    assert config.forks.turn == RlConfig().forks.turn


def test_every_reason_for_a_refusal_is_documented() -> None:
    assert all(f"forks_refused_{reason}" in DOCUMENT for reason in ForkRefusal)
