"""Templates from the environments of Harbor tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.builder import Builder
from etude.sandbox.images.harbor import template_from_environment
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image, Template
from tests.fakes.layer_runner import FakeLayerRunner
from tests.sandbox.images.image_builders import add_files, read_image, write_tree

DOCKERFILE = """FROM python:3.11-slim
RUN pip install --no-cache-dir pytest
WORKDIR /workspace
COPY workspace/ /workspace/
"""


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    store = ImageStore(tmp_path / "store")
    store.save(Image("python:3.11-slim", (add_files(store.layers, {"etc/name": b"x"}),), workdir="/"))
    return Builder(store, FakeLayerRunner())


def make(builder: Builder, folder: Path, files: dict[str, str]) -> Template:
    return asyncio.run(template_from_environment(write_tree(folder, files), builder))


def test_a_dockerfile_is_built(builder: Builder, tmp_path: Path) -> None:
    files = {"environment/Dockerfile": DOCKERFILE, "environment/workspace/lib/a.py": "a = 1"}
    template = make(builder, tmp_path / "task", files)
    assert template.workspace == "/workspace"
    assert template.name == "harbor/task"
    assert template.image is not None
    assert read_image(builder.store, template.image, "/workspace/lib/a.py") == b"a = 1"
    again = asyncio.run(template_from_environment(tmp_path / "task" / "environment", builder))
    assert again.digest == template.digest


def test_an_image_may_be_named_instead(builder: Builder, tmp_path: Path) -> None:
    template = make(
        builder, tmp_path / "task", {"task.toml": '[environment]\ndocker_image = "python:3.11-slim"'}
    )
    assert template.image is not None
    assert template.image.layers == builder.store.load("python:3.11-slim").layers
    assert template.workspace == "/workspace"


def test_host_means_no_image(builder: Builder, tmp_path: Path) -> None:
    assert (
        make(builder, tmp_path / "task", {"task.toml": '[environment]\ndocker_image = "host"'}).image is None
    )


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"other": ""}, "neither"),
        ({"task.toml": "[environment]\n"}, "neither"),
        ({"task.toml": "not toml"}, "cannot be read"),
        ({"task.toml": "[environment]\ndocker_image = 3"}, "name of an image"),
        ({"task.toml": '[environment]\ndocker_image = "a:1"'}, "no such base image"),
        ({"environment/Dockerfile": "FROM python:3.11-slim\nONBUILD x"}, "line 2: ONBUILD"),
    ],
)
def test_what_is_missing_or_wrong_is_a_typed_error(
    builder: Builder, tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason):
        make(builder, tmp_path / "task", files)
