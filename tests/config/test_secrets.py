"""A configuration says where secrets are, and holds none."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from etude.config import ClustersConfig, WeightsConfig, load_config
from etude.errors import ConfigError


def test_a_configuration_takes_no_secret_itself() -> None:
    with pytest.raises(ValidationError):
        WeightsConfig(token="hidden")
    with pytest.raises(ValidationError):
        ClustersConfig(token="hidden")


def test_a_secret_in_a_configuration_is_refused_without_being_shown(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[weights]\ntoken = 'hidden'\n")
    with pytest.raises(ConfigError, match="file:PATH or env:NAME") as caught:
        load_config(tmp_path / "run.toml")
    assert caught.value.field == "weights.token"
    assert "hidden" not in str(caught.value)
