"""Templates from the environments of Harbor tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.building import BuildOptions
from etude.sandbox.images.harbor import template_from_environment
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image, Template
from tests.sandbox.images.image_builders import add_files, write_tree


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    store = ImageStore(tmp_path / "store")
    store.save(Image("python:3.11-slim", (add_files(store.layers, {"etc/name": b"x"}),), workdir="/"))
    return store


def make(
    store: ImageStore, folder: Path, files: dict[str, str], bases: dict[str, str] | None = None
) -> Template:
    directory = write_tree(folder, files)
    return asyncio.run(template_from_environment(directory, store, BuildOptions(bases or {})))


def test_an_image_may_be_named_instead_of_a_dockerfile(store: ImageStore, tmp_path: Path) -> None:
    named = {"task.toml": '[environment]\ndocker_image = "python:3.11-slim"'}
    template = make(store, tmp_path / "task", named)
    assert template.image is not None
    assert template.image.layers == store.load("python:3.11-slim").layers
    assert (template.name, template.workspace) == ("harbor/task", "/workspace")


def test_the_map_of_bases_says_where_a_named_image_lies(store: ImageStore, tmp_path: Path) -> None:
    named = {"task.toml": '[environment]\ndocker_image = "ubuntu:24.04"'}
    template = make(store, tmp_path / "task", named, bases={"ubuntu:24.04": "python:3.11-slim"})
    assert template.image == store.load("python:3.11-slim")


def test_host_means_no_image(store: ImageStore, tmp_path: Path) -> None:
    named = {"task.toml": '[environment]\ndocker_image = "host"'}
    assert make(store, tmp_path / "task", named).image is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"other": ""}, "neither"),
        ({"task.toml": "[environment]\n"}, "neither"),
        ({"task.toml": "not toml"}, "cannot be read"),
        ({"task.toml": "[environment]\ndocker_image = 3"}, "name of an image"),
        ({"task.toml": '[environment]\ndocker_image = "a:1"'}, "no such base image"),
    ],
)
def test_what_is_missing_or_wrong_is_a_typed_error(
    store: ImageStore, tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason):
        make(store, tmp_path / "task", files)
