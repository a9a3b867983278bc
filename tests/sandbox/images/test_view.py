"""A stack of layers seen as one file system; compared with what overlayfs would show."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.layers import LayerStore
from etude.sandbox.images.view import ImageView
from tests.sandbox.images.image_builders import Row, add, file_member, member


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store")


def view(store: LayerStore, *layers: list[Row]) -> ImageView:
    return ImageView([store.path(add(store, *rows)) for rows in layers])


def content(seen: ImageView, path: str) -> bytes | None:
    found = seen.find(path)
    return None if found is None or found.is_dir else Path(found.path.decode()).read_bytes()


def names(seen: ImageView) -> list[str]:
    return [b"/".join(found.parts).decode() for found in seen.walk(()) if found.parts]


def test_upper_layers_win_and_directories_merge(store: LayerStore) -> None:
    seen = view(
        store,
        [file_member("d/a", b"1"), file_member("d/b", b"1")],
        [file_member("d/b", b"2"), file_member("d/c", b"2")],
    )
    assert [content(seen, f"/d/{name}") for name in "abc"] == [b"1", b"2", b"2"]
    assert names(seen) == ["d", "d/a", "d/b", "d/c"]


def test_whiteouts_and_opaque_directories_hide_lower_layers(store: LayerStore) -> None:
    seen = view(
        store,
        [file_member("d/a", b"1"), file_member("e/a", b"1"), file_member("f/a", b"1")],
        [
            file_member("d/.wh.a", b""),
            file_member("e/.wh..wh..opq", b""),
            file_member("e/b", b"2"),
            file_member(".wh.f", b""),
        ],
    )
    assert names(seen) == ["d", "e", "e/b"]
    assert [content(seen, path) for path in ("/d/a", "/e/a", "/f/a")] == [None, None, None]


def test_what_was_deleted_may_come_back(store: LayerStore) -> None:
    seen = view(store, [file_member("d/a", b"1")], [file_member(".wh.d", b"")], [file_member("d/b", b"3")])
    assert names(seen) == ["d", "d/b"]


def test_a_file_covers_a_directory_and_the_reverse(store: LayerStore) -> None:
    seen = view(
        store,
        [file_member("x/a", b"1"), file_member("y", b"1")],
        [file_member("x", b"2"), file_member("y/b", b"2")],
    )
    assert names(seen) == ["x", "y", "y/b"]


def test_links_are_followed_inside_the_image_only(store: LayerStore) -> None:
    seen = view(
        store,
        [file_member("usr/bin/tool", b"t"), member("bin", tarfile.SYMTYPE, link="usr/bin")],
        [
            member("usr/bin/alias", tarfile.SYMTYPE, link="/bin/tool"),
            member("up", tarfile.SYMTYPE, link="../../../etc"),
        ],
        [file_member("etc/name", b"inside")],
    )
    assert content(seen, "/bin/alias") == b"t"
    assert seen.resolve("/bin/new") == (b"usr", b"bin", b"new")
    assert content(seen, "/up/name") == b"inside"
    assert seen.resolve("/../..") == ()


def test_circular_links_are_refused(store: LayerStore) -> None:
    seen = view(store, [member("a", tarfile.SYMTYPE, link="b"), member("b", tarfile.SYMTYPE, link="a")])
    with pytest.raises(TemplateError, match="symbolic links"):
        seen.find("/a/x")
