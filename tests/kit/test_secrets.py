"""Sources of secrets, and errors for missing ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.kit.secrets import read_secret, read_secret_file


def test_a_secret_is_read_from_a_file_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("hidden\n")
    file.chmod(0o600)
    monkeypatch.setenv("ETUDE_TEST_TOKEN", " hidden ")
    assert read_secret(f"file:{file}", "token") == "hidden"
    assert read_secret("env:ETUDE_TEST_TOKEN", "token") == "hidden"
    assert read_secret_file(file, "--token-file") == "hidden"
    assert read_secret("", "token") is None
    assert read_secret_file(None, "--token-file") is None


@pytest.mark.parametrize("content", ["", "\n", "two words"])
def test_what_is_no_token_is_refused_without_being_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_secret(f"file:{file}", "weights.token")
    assert caught.value.field == "weights.token"
    assert "two words" not in str(caught.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hidden")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        read_secret(f"file:{file}", "token")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(f"file:{tmp_path / 'none'}", "token")
    with pytest.raises(ConfigError, match="is empty or not set"):
        read_secret("env:ETUDE_NO_SUCH_VARIABLE", "token")


def test_a_secret_in_the_place_of_its_name_is_refused_without_being_shown() -> None:
    for given in ("hidden", "file:", "vault:hidden"):
        with pytest.raises(ConfigError, match="must be file:PATH or env:NAME") as caught:
            read_secret(given, "--token")
        assert "hidden" not in str(caught.value)
