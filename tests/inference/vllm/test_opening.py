"""The configuration determines which server is used and how it is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from etude.config.engine import VllmConfig
from etude.errors import ConfigError
from etude.inference.vllm import ExternalServer, ManagedServer, make_vllm_sampler


def test_a_server_is_started_with_what_the_configuration_says() -> None:
    config = VllmConfig(python=sys.executable, arguments=("--max-model-len", "512"), environment=("A=b=c",))
    server = make_vllm_sampler(config, routed=True, dtype="float32").replica._server
    assert isinstance(server, ManagedServer)
    assert server.python == Path(sys.executable)
    assert list(server.arguments)[-4:] == ["--dtype", "float32", "--max-model-len", "512"]
    assert server.environment["A"] == "b=c"


def test_a_server_elsewhere_gets_its_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    config = VllmConfig(url="http://vllm.example.org", key_file=str(tmp_path / "key"))
    server = make_vllm_sampler(config).replica._server
    assert isinstance(server, ExternalServer) and server.key == "secret"


@pytest.mark.parametrize("python", ["", "/nowhere/bin/python"])
def test_no_server_is_an_error(python: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.vllm\.python"):
        make_vllm_sampler(VllmConfig(python=python))


@pytest.mark.parametrize("values", [{"python": "a", "url": "b"}, {"environment": ("novalue",)}])
def test_contradictions_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VllmConfig.model_validate(values)
