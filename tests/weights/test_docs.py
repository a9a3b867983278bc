"""The code in docs/weights.md runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from etude.config import parse_config

PAGE = (Path(__file__).parents[2] / "docs" / "weights.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_examples_run(block: str) -> None:
    exec(compile(block, "docs/weights.md", "exec"), {})


def test_the_configuration_is_one() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert parse_config(tomllib.loads(block)).weights.url == "s3://bucket/run"
