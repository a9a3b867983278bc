"""The snapshot store: atomic, fully checksummed, of known origin."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.kit.durable import DRAFTS
from etude.sandbox.errors import SnapshotError
from etude.sandbox.inside.frames import pack
from etude.sandbox.snapshots import (
    MANIFEST,
    SnapshotStore,
    Spec,
    this_machine,
)
from etude.sandbox.template import Image, Template, encode_template, unpack_templates
from etude.sandbox.types import Network, Resources, SnapshotInfo, SnapshotKind

TEMPLATE = Template({"a": "x", "d/b": bytes(range(256))}, "named")
CRASH = """
import sys
from pathlib import Path
from etude.sandbox.snapshots import SnapshotStore
draft = SnapshotStore(Path(sys.argv[1])).draft("crashed")
(draft.directory / "half").write_bytes(b"x" * 100000)
print("ready", flush=True)
sys.stdin.read()
"""


def keep(
    store: SnapshotStore,
    content: bytes = b"memory" * 1000,
    name: str | None = None,
    kind: SnapshotKind = "filesystem",
) -> SnapshotInfo:
    draft = store.draft("box")
    (draft.directory / "disk").write_bytes(content)
    draft.extra["number"] = 7
    return asyncio.run(
        store.publish(
            draft, kind=kind, name=name, backend="local", backend_version="1", sandbox_id="box",
            spec=Spec(TEMPLATE, Resources(num_processes=5), Network(("example.org",)), {"k": "v"}),
        )
    )  # fmt: skip


def opened(store: SnapshotStore, snapshot: str) -> None:
    asyncio.run(store.open(snapshot))


def test_what_is_published_is_read_back(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    info = keep(store, name="mine")
    found = asyncio.run(store.open(info.id))
    assert found.info == info
    assert (info.name, info.kind, info.backend, info.sandbox_id, info.template) == (
        "mine", "filesystem", "local", "box", "named",
    )  # fmt: skip
    assert found.file("disk").read_bytes() == b"memory" * 1000
    assert dict(found.spec.template.contents) == dict(TEMPLATE.contents)
    assert (found.spec.resources, found.spec.network) == (
        Resources(num_processes=5),
        Network(("example.org",)),
    )
    assert (found.spec.metadata, found.extra, found.machine) == ({"k": "v"}, {"number": 7}, this_machine())
    assert info.size_bytes == sum(p.stat().st_size for p in found.directory.iterdir() if p.name != MANIFEST)
    with pytest.raises(SnapshotError, match="has no file"):
        found.file("none")


def test_nobody_sees_a_draft_and_publishing_shows_all_of_it(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    draft = store.draft("box")
    (draft.directory / "disk").write_bytes(b"x")
    assert store.list("local") == []
    with pytest.raises(SnapshotError, match="does not exist"):
        opened(store, draft.id)
    assert [path.name for path in tmp_path.iterdir()] == [draft.scratch.path.name]
    store.discard(draft)
    store.discard(draft)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage", ["cut", "flip", "longer", "missing", "extra", "no template", "no manifest"]
)
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    store = SnapshotStore(tmp_path)
    snapshot = keep(store).id
    disk = tmp_path / snapshot / "disk"
    data = bytearray(disk.read_bytes())
    if damage == "cut":
        disk.write_bytes(data[:-1])
    elif damage == "flip":
        data[len(data) // 2] ^= 4
        disk.write_bytes(data)
    elif damage == "longer":
        disk.write_bytes(data + b"x")
    elif damage == "missing":
        disk.unlink()
    elif damage == "extra":
        (tmp_path / snapshot / "more").write_bytes(b"x")
    elif damage == "no template":
        (tmp_path / snapshot / "template").unlink()
    else:
        (tmp_path / snapshot / MANIFEST).unlink()
    with pytest.raises(SnapshotError) as raised:
        opened(store, snapshot)
    assert (raised.value.field, raised.value.received) == ("snapshot", snapshot)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[SnapshotStore, Path]:
    store = SnapshotStore(tmp_path_factory.mktemp("kept"))
    return store, store.root / keep(store).id


@given(st.data())
def test_any_flipped_bit_of_the_manifest_is_found(
    kept: tuple[SnapshotStore, Path], data: st.DataObject
) -> None:
    store, directory = kept
    whole = (directory / MANIFEST).read_bytes()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    (directory / MANIFEST).write_bytes(flipped)
    try:
        same = json.loads(flipped) == json.loads(whole)
    except ValueError:
        same = False
    try:
        if same:
            opened(store, directory.name)
        else:
            with pytest.raises(SnapshotError):
                opened(store, directory.name)
    finally:
        (directory / MANIFEST).write_bytes(whole)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_manifests_of_any_shape_are_refused_with_a_typed_error(
    kept: tuple[SnapshotStore, Path], data: st.DataObject
) -> None:
    store, directory = kept
    whole = (directory / MANIFEST).read_text()
    manifest = json.loads(whole)
    key = data.draw(st.sampled_from([*manifest, "files/disk", None]))
    value = data.draw(JSON)
    before = json.loads(whole)
    if key is None:
        manifest = value
    elif key == "files/disk":
        manifest["files"]["disk"] = value
    else:
        manifest[key] = value
    (directory / MANIFEST).write_text(json.dumps(manifest))
    try:
        if manifest != before:
            with pytest.raises(SnapshotError):
                opened(store, directory.name)
        assert all(info.id == directory.name for info in store.list("local"))
    finally:
        (directory / MANIFEST).write_text(whole)


def test_another_format_is_refused_by_number(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    snapshot = keep(store).id
    manifest = json.loads((tmp_path / snapshot / MANIFEST).read_text())
    (tmp_path / snapshot / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(SnapshotError, match="format 99"):
        opened(store, snapshot)
    (listed,) = store.list("local")
    assert (listed.id, listed.damaged) == (snapshot, "the snapshot has format 99")


def test_origin_is_checked_and_the_difference_named(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    found = asyncio.run(store.open(keep(store, kind="full").id))
    found.check_origin("local", "1", memory=True)
    with pytest.raises(SnapshotError, match=r"local backend.*vm backend.*files.download"):
        found.check_origin("vm", "1", memory=False)
    with pytest.raises(SnapshotError, match=r"version .1..*not .2."):
        found.check_origin("local", "2", memory=True)
    found.check_origin("local", "2", memory=False)
    for key in ("cpu", "kernel", "arch"):
        foreign = dataclasses.replace(found, machine={**found.machine, key: "other"})
        with pytest.raises(SnapshotError, match=f"made with {key} 'other'"):
            foreign.check_origin("local", "1", memory=True)
        foreign.check_origin("local", "1", memory=False)


def test_lists_are_oldest_first_and_of_one_backend(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "none/yet")
    assert store.list("local") == []
    made = [keep(store).id for _ in range(4)]
    (store.root / "snap-file").write_text("")
    assert [info.id for info in store.list("local")] == made
    assert store.list("vm") == []


@pytest.mark.parametrize("damage", ["cut", "missing", "extra", "manifest", "empty"])
def test_a_damaged_snapshot_is_listed_as_such_and_can_be_deleted(tmp_path: Path, damage: str) -> None:
    store = SnapshotStore(tmp_path)
    whole, torn = keep(store), keep(store, name="mine")
    directory = tmp_path / torn.id
    if damage == "cut":
        (directory / "disk").write_bytes(b"x")
    elif damage == "missing":
        (directory / "disk").unlink()
    elif damage == "extra":
        (directory / "more").write_bytes(b"")
    elif damage == "manifest":
        (directory / MANIFEST).write_text("{")
    else:
        for path in directory.iterdir():
            path.unlink()
    listed = {info.id: info for info in store.list("local")}
    assert listed[whole.id].damaged is None
    assert str(listed[torn.id].damaged).startswith("the snapshot ")
    if damage in ("manifest", "empty"):
        assert [info.id for info in store.list("vm")] == [torn.id], "whose it was is unknown"
    else:
        assert listed[torn.id].name == "mine"
        assert store.list("vm") == []
    with pytest.raises(SnapshotError):
        opened(store, torn.id)
    store.delete(torn.id)
    assert [path.name for path in tmp_path.iterdir()] == [whole.id]


def test_deleting_is_once_and_leaves_nothing(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    snapshot = keep(store).id
    store.delete(snapshot)
    assert list(tmp_path.iterdir()) == []
    for name in (snapshot, "../x", ".", "", "a/b", "snap-\n", f".etude-draft-{snapshot}"):
        for refused in (store.delete, lambda name: opened(store, name)):
            with pytest.raises(SnapshotError, match="does not exist"):
                refused(name)


def test_a_writer_that_was_killed_is_swept_by_the_next(tmp_path: Path) -> None:
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(
        [sys.executable, "-c", CRASH, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    ) as writer:  # fmt: skip
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        store = SnapshotStore(tmp_path)
        store.discard(store.draft("beside"))
        assert len(list(tmp_path.iterdir())) == 1, "a writer that lives is left alone"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    keep(store)
    assert [path.name[:5] for path in tmp_path.iterdir()] == ["snap-"]


def test_a_full_disk_is_a_snapshot_error_and_leaves_nothing(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    draft = store.draft("box")
    (draft.directory / "template").mkdir()
    with pytest.raises(SnapshotError, match="could not be written"):
        asyncio.run(
            store.publish(
                draft, kind="filesystem", name=None, backend="local", backend_version="1", sandbox_id="box",
                spec=Spec(TEMPLATE),
            )
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_an_exported_snapshot_is_taken_in_elsewhere_and_twice(tmp_path: Path) -> None:
    here, there = SnapshotStore(tmp_path / "here"), SnapshotStore(tmp_path / "there")
    info = keep(here)
    asyncio.run(here.export(info.id, tmp_path / "file"))
    for _ in range(2):
        assert asyncio.run(there.import_(tmp_path / "file", "local")) == info
    assert [path.name for path in there.root.iterdir()] == [info.id]
    opened(there, info.id)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "here", "there"]


def test_two_imports_of_one_snapshot_at_once_give_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = SnapshotStore(tmp_path / "here"), SnapshotStore(tmp_path / "there")
    info = keep(here)
    asyncio.run(here.export(info.id, tmp_path / "file"))
    assert asyncio.run(there.import_(tmp_path / "file", "local")) == info
    looks: list[Path] = []

    def exists(path: Path) -> bool:
        looks.append(path)
        return len(looks) > 1 and path.is_dir()

    monkeypatch.setattr(Path, "exists", exists)  # the other import appears behind the look
    assert asyncio.run(there.import_(tmp_path / "file", "local")) == info
    assert [path.name for path in there.root.iterdir()] == [info.id]


def test_an_export_that_fails_leaves_no_part(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "here")
    info = keep(store)
    (tmp_path / "taken").mkdir()
    for target in (tmp_path / "taken", tmp_path / "none/file"):
        with pytest.raises(SnapshotError, match="exported"):
            asyncio.run(store.export(info.id, target))
    with pytest.raises(SnapshotError, match="does not exist"):
        asyncio.run(store.export("snap-none", tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "taken"]


def refused(store: SnapshotStore, file: Path, match: str = "the snapshot") -> None:
    with pytest.raises(SnapshotError, match=match):
        asyncio.run(store.import_(file, "local"))
    assert list(store.root.iterdir()) == []


def test_a_snapshot_of_another_backend_is_not_taken_in(tmp_path: Path) -> None:
    here, there = SnapshotStore(tmp_path / "here"), SnapshotStore(tmp_path / "there")
    asyncio.run(here.export(keep(here).id, tmp_path / "file"))
    with pytest.raises(SnapshotError, match="local backend"):
        asyncio.run(there.import_(tmp_path / "file", "vm"))
    assert list(there.root.iterdir()) == []


def tar(file: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file


def link(name: str, kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ".", ".hidden", "-x", "x" * 200, ""])
def test_names_that_lead_out_are_not_taken_in(tmp_path: Path, name: str) -> None:
    refused(SnapshotStore(tmp_path / "s"), tar(tmp_path / "f", (tarfile.TarInfo(name), b"x")), "holds")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", "s"]


KINDS = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"S"]
"""The last one: a file with holes."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["none", "/etc/passwd", "a"])
def test_only_plain_files_are_taken_in(tmp_path: Path, kind: bytes, target: str) -> None:
    members = (tarfile.TarInfo("a"), b"x"), (link("b", kind, target), b"")
    refused(SnapshotStore(tmp_path / "s"), tar(tmp_path / "f", *members), "holds")


def test_garbage_and_what_is_not_there_are_not_taken_in(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "s")
    for data in (b"", b"x", os.urandom(20_000), b"\0" * 20_000):
        (tmp_path / "f").write_bytes(data)
        refused(store, tmp_path / "f")
    refused(store, tmp_path / "none", "cannot be read")
    refused(store, tmp_path, "cannot be read")


@given(st.data())
def test_a_torn_export_is_not_taken_in(kept: tuple[SnapshotStore, Path], data: st.DataObject) -> None:
    store, directory = kept
    file = store.root.parent / "export"
    asyncio.run(store.export(directory.name, file))
    whole = file.read_bytes()
    # A tar file ends with zeros that carry nothing.
    used = len(whole.rstrip(b"\0"))
    file.write_bytes(whole[: data.draw(st.integers(0, used - 1))])
    refused(SnapshotStore(store.root.parent / "target"), file)


@given(
    st.lists(st.tuples(st.text("abc/", min_size=1, max_size=5), st.binary(max_size=20)), max_size=4),
    st.none() | st.builds(Image, st.text(max_size=5), st.lists(st.text(max_size=5)).map(tuple)),
)
def test_templates_survive_packing(files: list[tuple[str, bytes]], image: Image | None) -> None:
    names = {path.strip("/").replace("/", "") or "x": data for path, data in files}
    template = Template(names, "t", image)
    (found,) = unpack_templates(pack(*encode_template(template)), "x", 1)
    assert (found.digest, found.name, found.image) == (template.digest, "t", image)


@given(st.binary(max_size=100))
def test_packed_templates_that_are_garbage_are_refused(data: bytes) -> None:
    with pytest.raises(SnapshotError):
        unpack_templates(data, "x", 1)


def owned(store: SnapshotStore) -> str:
    draft = store.draft("box")
    (draft.directory / "disk").write_bytes(b"x")
    publishing = store.publish(
        draft, kind="filesystem", name=None, backend="local", backend_version="1", sandbox_id="box",
        spec=Spec(TEMPLATE), temporary=True,
    )  # fmt: skip
    return asyncio.run(publishing).id


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_temporary_snapshot_is_in_no_list_and_goes_when_it_is_deleted(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    kept, snapshot = keep(store).id, owned(store)
    assert [info.id for info in store.list("local")] == [kept]
    opened(store, snapshot)
    store.sweep()
    opened(store, snapshot)
    assert len(names(tmp_path)) == 2
    store.delete(snapshot)
    assert names(tmp_path) == [kept]


def test_temporary_snapshots_of_the_dead_are_swept_by_the_next_writer(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    kept, mine = keep(store).id, owned(store)
    orphan = tmp_path / f"{DRAFTS}of-the-dead" / "snap-1"
    orphan.mkdir(parents=True)
    later = keep(store).id
    assert not orphan.exists()
    opened(store, mine)
    assert names(tmp_path)[1:] == sorted([kept, later])


def test_a_copy_in_transit_is_temporary_where_it_arrives(tmp_path: Path) -> None:
    here, there = SnapshotStore(tmp_path / "here"), SnapshotStore(tmp_path / "there")
    temporary, durable = owned(here), keep(here).id
    for snapshot in (temporary, durable, temporary):
        asyncio.run(here.export(snapshot, tmp_path / snapshot))
        assert asyncio.run(there.import_(tmp_path / snapshot, "local")).id == snapshot
    assert (there.is_in_transit(temporary), there.is_in_transit(durable)) == (True, False)
    assert not here.is_in_transit(temporary)
    assert len(names(there.root)) == 2
    assert [info.id for info in there.list("local")] == [durable]
    opened(there, temporary)
    there.delete(temporary)
    assert names(there.root) == [durable]
    opened(here, temporary)
