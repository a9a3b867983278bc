"""The code of docs/async.md runs, and its keys are those of the configuration."""

import re
import tomllib
from pathlib import Path

from etude.config import RlConfig, parse_config

DOCUMENT = (Path(__file__).parents[2] / "docs" / "async.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def test_the_python_of_the_document_runs(capsys) -> None:
    (code,) = blocks("python")
    exec(compile(code, "docs/async.md", "exec"), {})
    assert re.fullmatch(r"\d+ simulated seconds\n", capsys.readouterr().out)


def test_the_keys_of_the_document_are_those_of_the_configuration() -> None:
    first, second = (tomllib.loads(text) for text in blocks("toml"))
    config = RlConfig.model_validate(first["rl"])
    assert config.max_staleness == 4
    assert config.curriculum == RlConfig().curriculum, "but for the bound they are the defaults"
    assert parse_config(second).tasks.family == "directory"
