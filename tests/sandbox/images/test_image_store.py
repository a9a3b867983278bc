"""Named images: kept whole, refused when damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.template import Image
from tests.sandbox.images.image_builders import add_files, layers_of


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def make(store: ImageStore, name: str = "debian:bookworm") -> Image:
    image = Image(name, (add_files(store.layers, {"a": b"1"}),), {"LANG": "C"}, "/app", "agent")
    store.save(image)
    return image


def record_of(store: ImageStore) -> Path:
    return next((store.layers.root / "images").glob("*.json"))


@pytest.mark.parametrize(
    "name",
    ["plain", "debian:bookworm", "a/b/c:1", "localhost:5000/My_Task.v2:x-1", f"a@sha256:{'0' * 64}", "a..b"],
)
def test_an_image_comes_back_as_it_was_saved(store: ImageStore, name: str) -> None:
    image = make(store, name)
    assert store.load(name) == image
    assert store.list() == [name]
    assert [path.parent for path in (store.layers.root / "images").iterdir()] == [
        store.layers.root / "images"
    ]


@pytest.mark.parametrize(
    "name",
    ["", "../../escape", "/abs", "a/", "a//b", ".hidden", "-x", "ünïcode", "a b", "a\n", "a:", "x" * 201],
)
def test_what_from_could_not_name_is_refused(store: ImageStore, name: str) -> None:
    with pytest.raises(TemplateError, match="not a valid image name"):
        make(store, name)
    assert store.list() == []


def test_an_unknown_image_names_the_known_ones(store: ImageStore) -> None:
    make(store)
    with pytest.raises(TemplateError, match="debian:bookworm"):
        store.load("other")
    with pytest.raises(TemplateError, match="no such image"):
        store.remove("other")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"layers": 3}', b"\xff\xfe"])
def test_a_torn_record_is_refused(store: ImageStore, data: bytes) -> None:
    make(store)
    record_of(store).write_bytes(data)
    with pytest.raises(TemplateError, match="damaged"):
        store.load("debian:bookworm")


@pytest.mark.parametrize(
    "change", [{"user": "root"}, {"env": {}}, {"layers": []}, {"name": "x"}, {"version": 2}]
)
def test_a_changed_record_is_refused(store: ImageStore, change: dict[str, object]) -> None:
    make(store)
    record = record_of(store)
    record.write_text(json.dumps({**json.loads(record.read_bytes()), **change}))
    with pytest.raises(TemplateError, match="damaged"):
        store.load("debian:bookworm")


def test_an_image_without_its_layer_is_refused(store: ImageStore) -> None:
    image = make(store)
    shutil.rmtree(store.layers.path(image.layers[0]).parent)
    with pytest.raises(TemplateError, match="no such layer"):
        store.load(image.name)
    with pytest.raises(TemplateError, match="no such layer"):
        store.save(image)


def test_removing_a_name_keeps_the_layers(store: ImageStore) -> None:
    image = make(store)
    store.remove(image.name)
    assert store.list() == []
    assert layers_of(store.layers) == list(image.layers)


def test_a_torn_cache_entry_is_no_entry(store: ImageStore) -> None:
    key = "0" * 64
    store.write_cache(key, {"layer": None})
    assert store.read_cache(key) == {"layer": None}
    (store.layers.root / "cache" / f"{key}.json").write_bytes(b'{"lay')
    assert store.read_cache(key) is None
    assert store.read_cache("1" * 64) is None
