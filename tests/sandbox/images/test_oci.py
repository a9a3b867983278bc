"""Imported images: OCI layouts, archives of `docker save`, and damaged ones."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.images.oci import (
    DOCKER,
    INDEXES,
    LAYERS,
    OCI,
    architecture,
    export_image,
    import_image,
)
from etude.sandbox.template import Image
from tests.cli.commands import etude
from tests.sandbox.images.image_builders import (
    Layout,
    add_files,
    digest_of,
    file_member,
    layers_of,
    leftovers,
    member,
    read_image,
    tar_bytes,
)

LAYER = tar_bytes(file_member("etc/name", b"first"), file_member("etc/gone", b"x"))
UPPER = tar_bytes(file_member("etc/.wh.gone", b""), file_member("app/main.py", b"print()"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def simple(**options: Any) -> Layout:
    layout = Layout()
    return layout.index(layout.image(LAYER, UPPER, **options))


def archive(path: Path) -> list[tuple[str, bytes]]:
    """Names and contents of a tar archive's files."""
    with tarfile.open(path) as tar:
        return [(row.name, tar.extractfile(row).read()) for row in tar if row.isfile()]  # type: ignore[union-attr]


def check(store: ImageStore, image: Image) -> None:
    assert image == store.load(image.name)
    assert image.layers == (digest_of(LAYER), digest_of(UPPER))
    assert (image.env, image.workdir, image.user) == ({"A": "b=c"}, "/app", "me")
    assert read_image(store, image, "/etc/name") == b"first"
    assert read_image(store, image, "/etc/gone") is None
    assert leftovers(store.layers) == []


KINDS = [
    (bytes, LAYERS[0]),
    (gzip.compress, LAYERS[1]),
    (zstandard.compress, LAYERS[2]),
    (gzip.compress, f"{DOCKER}.image.rootfs.diff.tar.gzip"),
]


@pytest.mark.parametrize(("compress", "kind"), KINDS)
def test_a_layout_directory_is_imported(store: ImageStore, tmp_path: Path, compress: Any, kind: str) -> None:
    check(store, import_image(simple(compress=compress, kind=kind).write(tmp_path / "in"), store, "x"))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_layout_archive_is_imported(store: ImageStore, tmp_path: Path, compress: Any) -> None:
    check(store, import_image(simple().pack(tmp_path / "in.tar", compress), store, "x"))


def docker_archive(config_name: str | None = None) -> bytes:
    config = {
        "architecture": architecture(),
        "os": "linux",
        "config": {"Env": ["A=b=c"], "WorkingDir": "/app", "User": "me"},
        "rootfs": {"diff_ids": [digest_of(LAYER), digest_of(UPPER)]},
    }
    data = json.dumps(config).encode()
    name = config_name or f"{digest_of(data)[7:]}.json"
    rows = [{"Config": name, "RepoTags": ["x:1"], "Layers": ["one/layer.tar", "two/layer.tar"]}]
    return tar_bytes(
        file_member("real.tar", LAYER),
        member("one/layer.tar", tarfile.SYMTYPE, link="../real.tar"),
        file_member("two/layer.tar", UPPER),
        file_member(name, data),
        file_member("manifest.json", json.dumps(rows).encode()),
    )


def test_an_archive_of_docker_save_is_imported(store: ImageStore, tmp_path: Path) -> None:
    path = tmp_path / "saved.tar"
    path.write_bytes(docker_archive())
    check(store, import_image(path, store, "x", reference="x:1"))
    with pytest.raises(TemplateError, match=r"holds 0 matching images.* x:1$"):
        import_image(path, store, "x", reference="y:1")


def test_a_configuration_of_docker_save_must_be_what_its_name_says(store: ImageStore, tmp_path: Path) -> None:
    path = tmp_path / "saved.tar"
    path.write_bytes(docker_archive(f"{'0' * 64}.json"))
    with pytest.raises(TemplateError, match="digest"):
        import_image(path, store, "x")


def test_the_platform_is_chosen_and_attestations_are_passed_over(store: ImageStore, tmp_path: Path) -> None:
    layout = Layout()
    other = {
        **layout.image(LAYER, architecture="other"),
        "platform": {"os": "linux", "architecture": "other"},
    }
    unknown = {**layout.image(UPPER), "platform": {"os": "unknown", "architecture": "unknown"}}
    ours = {**layout.image(LAYER, UPPER), "platform": {"os": "linux", "architecture": architecture()}}
    nested = layout.document({"manifests": [other, unknown, ours]}, INDEXES[0])
    path = layout.index(nested).write(tmp_path / "in")
    check(store, import_image(path, store, "x"))
    path = layout.index(other, unknown).write(tmp_path / "foreign")
    with pytest.raises(TemplateError, match="holds 0 matching images"):
        import_image(path, store, "x")


def test_one_of_several_images_is_chosen_by_its_name(store: ImageStore, tmp_path: Path) -> None:
    layout = Layout()
    named = [
        {**image, "annotations": {"org.opencontainers.image.ref.name": name}}
        for name, image in (("a", layout.image(LAYER)), ("b", layout.image(LAYER, UPPER)))
    ]
    path = layout.index(*named).write(tmp_path / "in")
    command = ["sandbox", "image", "import", str(path), "x", "--state", str(tmp_path / "state")]
    for wrong in ([], ["--tag", "c"]):
        assert r"in it (`--tag`): a, b" in etude(*command, *wrong).stderr
    assert etude(*command, "--tag", "b").exit_code == 0
    check(store, import_image(path, store, "x", reference="b"))


@pytest.mark.parametrize("name", sorted(simple().files))
def test_any_damaged_or_missing_part_is_found(store: ImageStore, tmp_path: Path, name: str) -> None:
    if name == "oci-layout":
        return  # says nothing but its version
    layout = simple()
    data = bytearray(layout.files[name])
    data[len(data) // 3] ^= 1
    layout.files[name] = bytes(data)
    with pytest.raises(TemplateError):
        import_image(layout.write(tmp_path / "in"), store, "x")
    del layout.files[name]
    with pytest.raises(TemplateError):
        import_image(layout.pack(tmp_path / "in.tar"), store, "x")
    assert store.list() == []
    assert leftovers(store.layers) == []


def test_a_layer_that_fits_its_blob_but_not_its_diff_id_is_refused(store: ImageStore, tmp_path: Path) -> None:
    layout = Layout()
    layout.index(layout.image(LAYER, rootfs={"diff_ids": [digest_of(UPPER)]}))
    with pytest.raises(TemplateError, match="digest"):
        import_image(layout.write(tmp_path / "in"), store, "x")


def test_a_compressed_layer_that_is_not_its_digest_is_refused(store: ImageStore, tmp_path: Path) -> None:
    layout = simple(compress=gzip.compress, kind=LAYERS[1])
    name = next(name for name, data in layout.files.items() if data[:2] == b"\x1f\x8b")
    layout.files[name] = gzip.compress(gzip.decompress(layout.files[name]), compresslevel=1, mtime=7)
    with pytest.raises(TemplateError, match="digest"):
        import_image(layout.write(tmp_path / "in"), store, "x")


BROKEN: dict[str, Callable[[Layout], object]] = {
    "layer type": lambda layout: layout.index(layout.image(LAYER, kind=f"{OCI}.layer.v1.tar+encrypted")),
    "manifest type": lambda layout: layout.index({**layout.image(LAYER), "mediaType": "text/plain"}),
    "size": lambda layout: layout.index({**layout.image(LAYER), "size": 1}),
    "digest": lambda layout: layout.index({**layout.image(LAYER), "digest": "sha256:../../../etc/passwd"}),
    "algorithm": lambda layout: layout.index({**layout.image(LAYER), "digest": f"md5:{'0' * 32}"}),
    "platform": lambda layout: layout.index(layout.image(LAYER, architecture="vax")),
    "system": lambda layout: layout.index(layout.image(LAYER, os="windows")),
    "layer count": lambda layout: layout.index(layout.image(LAYER, rootfs={"diff_ids": []})),
    "no rootfs": lambda layout: layout.index(layout.image(LAYER, rootfs=None)),
    "env": lambda layout: layout.index(layout.image(LAYER, config={"Env": [7]})),
    "half a character": lambda layout: layout.index(layout.image(LAYER, config={"User": "\ud800"})),
    "workdir": lambda layout: layout.index(layout.image(LAYER, config={"WorkingDir": "relative"})),
    "not an object": lambda layout: layout.files.update({"index.json": b"[]"}),
    "deep json": lambda layout: layout.files.update({"index.json": b"[" * 100_000}),
    "no json": lambda layout: layout.files.update({"index.json": b"\xff"}),
    "huge": lambda layout: layout.files.update({"index.json": b" " * (5 << 20)}),
    "empty": lambda layout: layout.index(),
    "neither": lambda layout: layout.files.clear(),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_layouts_are_typed_errors(store: ImageStore, tmp_path: Path, name: str) -> None:
    layout = Layout()
    BROKEN[name](layout)
    (tmp_path / "in").mkdir()
    with pytest.raises(TemplateError):
        import_image(layout.write(tmp_path / "in"), store, "x")
    assert store.list() == []


def test_an_index_that_names_itself_comes_to_an_end(store: ImageStore, tmp_path: Path) -> None:
    layout = Layout()
    row = layout.image(LAYER)
    for _ in range(6):
        row = layout.document({"manifests": [row]}, INDEXES[0])
    with pytest.raises(TemplateError, match="too many indexes"):
        import_image(layout.index(row).write(tmp_path / "in"), store, "x")


def test_a_directory_cannot_name_files_outside_of_it(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "secret.tar").write_bytes(LAYER)
    config = {"architecture": architecture(), "rootfs": {"diff_ids": [digest_of(LAYER)]}}
    rows = [{"Config": "config.json", "Layers": ["../secret.tar"]}]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps(rows))
    with pytest.raises(TemplateError, match="lacks a part"):
        import_image(folder, store, "x")


def test_missing_files_and_other_files_are_typed_errors(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for name in ("absent", "text"):
        with pytest.raises(TemplateError):
            import_image(tmp_path / name, store, "x")


def test_an_exported_image_comes_back_equal(store: ImageStore, tmp_path: Path) -> None:
    image = import_image(simple().write(tmp_path / "in"), store, "named")
    digest = export_image(image, store, tmp_path / "out.tar")
    other = ImageStore(tmp_path / "other")
    again = import_image(tmp_path / "out.tar", other, "named", reference="named")
    assert (again.env, again.workdir, again.user) == (image.env, image.workdir, image.user)
    assert read_image(other, again, "/app/main.py") == b"print()"
    assert read_image(other, again, "/etc/gone") is None
    # Packed layers are packed to equal bytes again, wherever that is.
    assert export_image(again, other, tmp_path / "out2.tar") == digest
    assert (tmp_path / "out.tar").read_bytes() == (tmp_path / "out2.tar").read_bytes()


def test_what_was_exported_is_known_when_it_comes_back_whatever_its_layers_were_packed_by(
    store: ImageStore, tmp_path: Path
) -> None:
    unsorted = tar_bytes(file_member("b", b"1"), file_member("a", b"2"))
    layout = Layout()
    image = import_image(layout.index(layout.image(unsorted)).write(tmp_path / "in"), store, "x")
    export_image(image, store, tmp_path / "out.tar")
    config = json.loads(next(data for name, data in archive(tmp_path / "out.tar") if b"diff_ids" in data))
    assert config["rootfs"]["diff_ids"] != list(image.layers)
    assert import_image(tmp_path / "out.tar", store, "y").layers == image.layers
    assert layers_of(store.layers) == list(image.layers)


def test_an_export_that_fails_leaves_no_file(store: ImageStore, tmp_path: Path) -> None:
    image = Image("x", (add_files(store.layers, {"a": b"1"}), add_files(store.layers, {"b": b"1"})))
    (store.layers.path(image.layers[1]).parent / "layer.json").unlink()
    with pytest.raises(TemplateError, match="no such layer"):
        export_image(image, store, tmp_path / "out.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
