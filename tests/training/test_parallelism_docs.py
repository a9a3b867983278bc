"""docs/parallelism.md: its settings load, its program runs, and its table is what was measured."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from etude.config import parse_config
from etude.config.parallel import ParallelConfig
from etude.training.parallel.mesh import AXES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(language: str) -> list[str]:
    return [found[2] for found in BLOCK.finditer(PAGE) if found[1] == language]


@pytest.mark.parametrize("block", _blocks("toml"))
def test_every_setting_loads_and_every_key_is_named(block: str) -> None:
    settings = tomllib.loads(block)
    assert parse_config(settings).parallel.replicate == 2
    assert settings["parallel"].keys() == ParallelConfig.model_fields.keys()


def test_the_program_runs() -> None:
    (block,) = _blocks("python")
    exec(compile(block, "docs/parallelism.md", "exec"), {})


def test_the_table_is_the_benchmarks() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "parallelism.json").read_text(encoding="utf-8"))
    for row in result["peers"]["arrangements"]:
        axes = " | ".join(str(row.get(axis, 1)) for axis in AXES)
        figures = f"{row['loss_error']:.1e} | {row['gradient_error']:.1e}"
        assert f"| {axes} | {row['micro_batches_per_rank']} | {figures} |" in PAGE
