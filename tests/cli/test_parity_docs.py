"""The page about parity says what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from etude.config import ParityConfig, parse_config
from etude.native import find_compiler
from tests.cli.commands import option_names

PAGE = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_options_on_the_page_are_those_there_are() -> None:
    known = option_names("doctor", "parity")
    usage = PAGE.partition("## Measured")[0]
    of_training = {"--config", "--set", "--resume", "--executor"}
    written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", usage)) - of_training
    assert written == {option for option in known if option.startswith("--")} - {"--help"}


def test_the_defaults_on_the_page_are_those_there_are() -> None:
    (text,) = blocks("toml")
    assert parse_config(tomllib.loads(text)).parity == ParityConfig()


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_the_example_runs() -> None:
    (text,) = blocks("python")
    exec(compile(text, "docs/parity.md", "exec"), {"__name__": "example"})
