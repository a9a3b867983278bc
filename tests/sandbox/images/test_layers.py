"""Layers: extracted safely, published whole, packed again to equal bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ResourceError
from etude.sandbox.errors import TemplateError
from etude.sandbox.images import image_store
from etude.sandbox.images.extract import OPAQUE_XATTR
from etude.sandbox.images.image_store import LayerStore, default_owner
from tests.sandbox.images.image_builders import (
    Row,
    add,
    add_files,
    file_member,
    layer_bytes,
    layers_of,
    leftovers,
    member,
    tar_bytes,
    tree,
)


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store")


def root_of(store: LayerStore, *rows: Row) -> Path:
    return store.path(add(store, *rows))


def export(store: LayerStore, digest: str) -> bytes:
    target = io.BytesIO()
    store.export_tar(digest, target)
    return target.getvalue()


def test_a_layer_is_named_by_its_archive_however_it_is_compressed(store: LayerStore) -> None:
    data = tar_bytes(file_member("etc/name", b"x"))
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    for packed in (data, gzip.compress(data), zstandard.compress(data)):
        assert store.add_tar(io.BytesIO(packed)) == digest
    assert layers_of(store) == [digest]
    assert (store.path(digest) / "etc/name").read_bytes() == b"x"
    assert leftovers(store) == []


def test_every_file_belongs_to_one_user_who_can_read_it(store: LayerStore) -> None:
    root = root_of(
        store,
        member("locked", tarfile.DIRTYPE, 0o000),
        file_member("locked/secret", b"x", 0o000),
        file_member("locked/tool", b"x", 0o6711),
        member("tmp", tarfile.DIRTYPE, 0o1777),
        member("link", tarfile.SYMTYPE, link="/nowhere"),
    )
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}
    assert modes["locked"] == 0o700
    assert modes["secret"] == 0o600
    assert modes["tool"] == 0o711
    assert modes["tmp"] == 0o1777
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in [root, *root.rglob("*")]}
    assert owners == {default_owner()}


def test_times_are_kept(store: LayerStore) -> None:
    root = root_of(store, member("d", tarfile.DIRTYPE, 0o755, mtime=11), file_member("d/f", b""))
    assert (root / "d").stat().st_mtime == 11
    assert (root / "d/f").stat().st_mtime == 5


def test_devices_and_pipes_are_left_out(store: LayerStore) -> None:
    digest = add(
        store, member("dev/null", tarfile.CHRTYPE), member("pipe", tarfile.FIFOTYPE), file_member("f", b"")
    )
    assert tree(store.path(digest)) == {"f": ""}


def test_whiteouts_become_what_overlayfs_understands(store: LayerStore) -> None:
    root = root_of(
        store,
        file_member("etc/.wh.gone", b""),
        file_member("var/.wh..wh..opq", b""),
        file_member("var/new", b"n"),
    )
    status = (root / "etc/gone").lstat()
    assert stat.S_ISCHR(status.st_mode)
    assert status.st_rdev == 0
    assert os.getxattr(root / "var", OPAQUE_XATTR) == b"y"
    assert sorted(tree(root)) == ["etc", "etc/gone", "var", "var/new"]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_whiteout_never_hides_what_its_own_layer_adds(store: LayerStore, reverse: bool) -> None:
    rows: list[Row] = [
        file_member(".wh.a", b""),
        file_member("a/new", b"n"),
        file_member(".wh.f", b""),
        file_member("f", b"n"),
    ]
    root = root_of(store, *(reversed(rows) if reverse else rows))
    assert tree(root) == {"a": "dir", "a/new": "n", "f": "n"}
    assert os.getxattr(root / "a", OPAQUE_XATTR) == b"y"


def test_later_entries_replace_earlier_ones(store: LayerStore) -> None:
    root = root_of(
        store,
        file_member("d/inner/x", b"1"),
        file_member("d", b"now a file"),
        member("l", tarfile.SYMTYPE, link="/etc"),
        file_member("l", b"now a file, too"),
        file_member("f", b"1"),
        member("f", tarfile.DIRTYPE, 0o755),
        file_member("f/y", b"2"),
        file_member("g", b"first"),
        file_member("g", b"second"),
    )
    assert tree(root) == {"d": "now a file", "l": "now a file, too", "f": "dir", "f/y": "2", "g": "second"}


def test_hard_links_stay_links(store: LayerStore) -> None:
    digest = add(store, file_member("a", b"x"), member("d/b", tarfile.LNKTYPE, link="./a"))
    root = store.path(digest)
    assert (root / "a").stat().st_ino == (root / "d/b").stat().st_ino
    assert (root / "a").stat().st_nlink == 2
    with tarfile.open(fileobj=io.BytesIO(export(store, digest))) as archive:
        assert archive.getmember("d/b").linkname == "a"


OUT = member("out", tarfile.SYMTYPE, link="{outside}")
DIRECTORY = member("d", tarfile.DIRTYPE, 0o755)
HOSTILE: dict[str, list[Row]] = {
    "dots": [file_member("../escaped", b"x")],
    "dots inside": [file_member("a/../../escaped", b"x")],
    "link parent": [OUT, file_member("out/escaped", b"x")],
    "relative link parent": [
        member("out", tarfile.SYMTYPE, link="../../.."),
        file_member("out/escaped", b"x"),
    ],
    "link to link": [
        DIRECTORY,
        member("d/up", tarfile.SYMTYPE, link="{outside}"),
        member("d/up/deeper", tarfile.DIRTYPE, 0o755),
        file_member("d/up/deeper/escaped", b"x"),
    ],
    "hard link outside": [member("h", tarfile.LNKTYPE, link="../../../../secret")],
    "hard link through link": [OUT, member("h", tarfile.LNKTYPE, link="out/secret")],
    "hard link to directory": [DIRECTORY, member("h", tarfile.LNKTYPE, link="d")],
    "hard link to nothing": [member("h", tarfile.LNKTYPE, link="absent")],
    "whiteout through link": [OUT, file_member("out/.wh.secret", b"")],
    "opaque through link": [OUT, file_member("out/.wh..wh..opq", b"")],
    "whiteout of nothing": [file_member("d/.wh.", b"")],
    "whiteout of parent": [file_member("d/.wh...", b"")],
    "below a file": [file_member("f", b""), file_member("f/g", b"")],
    "nameless": [member(".", tarfile.SYMTYPE, link="x")],
    "deep": [file_member("d/" * 300 + "f", b"")],
    "long": [file_member("/".join(["n" * 200] * 20), b"")],
    "long component": [file_member("n" * 300, b"")],
    "empty link": [member("l", tarfile.SYMTYPE, link="")],
    "sparse": [member("x", tarfile.GNUTYPE_SPARSE)],
    "unknown type": [member("x", b"M")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused_and_leave_nothing(name: str, tmp_path: Path, store: LayerStore) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s")
    rows: list[Row] = []
    for row in HOSTILE[name]:
        info, data = row if isinstance(row, tuple) else (row, b"")
        copied = member(info.name, info.type, info.mode, info.linkname.replace("{outside}", str(outside)))
        copied.size = info.size
        rows.append((copied, data))
    with pytest.raises(TemplateError):
        add(store, *rows)
    assert tree(outside) == {"secret": "s"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "store"]
    assert layers_of(store) == []
    assert leftovers(store) == []


def test_absolute_names_begin_at_the_layer(store: LayerStore) -> None:
    root = root_of(store, file_member("/etc/passwd", b"mine"))
    assert (root / "etc/passwd").read_bytes() == b"mine"


def test_a_directory_entry_replaces_a_link_and_does_not_follow_it(tmp_path: Path, store: LayerStore) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    root = root_of(
        store,
        member("d", tarfile.SYMTYPE, link=str(outside)),
        member("d", tarfile.DIRTYPE, 0o700),
        file_member("d/f", b""),
    )
    assert tree(root) == {"d": "dir", "d/f": ""}
    assert tree(outside) == {}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755


def test_sizes_and_counts_are_bounded(store: LayerStore) -> None:
    bomb = gzip.compress(tar_bytes(file_member("zeros", bytes(5 << 20))))
    with pytest.raises(TemplateError, match="larger than allowed"):
        store.add_tar(io.BytesIO(bomb), limit_bytes=1 << 20)
    many = tar_bytes(*(member(f"{number}") for number in range(20)))
    with pytest.raises(TemplateError, match="more than 10 entries"):
        store.add_tar(io.BytesIO(many), max_entries=10)
    assert leftovers(store) == []


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_a_torn_archive_leaves_nothing(store: LayerStore, compress: Callable[[bytes], bytes]) -> None:
    data = compress(tar_bytes(file_member("a", os.urandom(4000)), file_member("b", os.urandom(4000))))
    for length in (0, 3, 100, len(data) // 2, 4500):
        with pytest.raises(TemplateError):
            store.add_tar(io.BytesIO(data[:length]))
    assert layers_of(store) == []
    assert leftovers(store) == []


def test_another_digest_than_expected_is_refused(store: LayerStore) -> None:
    with pytest.raises(TemplateError, match="digest"):
        store.add_tar(io.BytesIO(tar_bytes(file_member("a", b""))), expected=f"sha256:{'0' * 64}")
    assert layers_of(store) == []


FILL = """
import io, os, sys
from pathlib import Path
from etude.errors import ResourceError
from tests.sandbox.images.image_builders import layer_bytes, layers_of
from etude.sandbox.images.image_store import LayerStore
store = LayerStore(Path(sys.argv[1]))
store.owner = (0, 0)
store.add_tar(io.BytesIO(layer_bytes({"small": b"x"})))
try:
    store.add_tar(io.BytesIO(layer_bytes({f"f{n}": bytes(100_000) for n in range(30)})))
except ResourceError as error:
    print(error.message, len(layers_of(store)), os.listdir(store.root / "tmp"))
"""


@pytest.mark.slow
def test_a_full_disk_is_the_users_to_mend_and_leaves_nothing(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=2m t {tmp_path} || exit 99; exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script, FILL], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 99 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no tmpfs in a user namespace here: {done.stderr.strip()}")
    assert done.stdout.strip() == "no space left for layers 1 []", done.stderr


@pytest.mark.slow
def test_an_owner_that_does_not_exist_here_is_the_users_to_mend(tmp_path: Path) -> None:
    program = FILL.split("try:")[0].replace("(0, 0)", "(65534, 65534)")
    command = ["unshare", "-Ur", sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no user namespace here: {done.stderr.strip()}")
    assert "ResourceError: layer store: the owner of layer files cannot be set" in done.stderr


def test_one_layer_added_by_many_at_once_is_there_once(store: LayerStore) -> None:
    data = tar_bytes(*(file_member(f"d/{number}", b"x" * 1000) for number in range(50)))
    with ThreadPoolExecutor(8) as pool:
        digests = set(pool.map(lambda _: store.add_tar(io.BytesIO(data)), range(16)))
    assert layers_of(store) == list(digests)
    assert leftovers(store) == []


@pytest.mark.parametrize("record", [b"", b"{", b"[]", b"{}", b'{"version": 1}', b"\xff"])
def test_a_torn_record_makes_the_layer_damaged_and_adding_it_again_mends_it(
    store: LayerStore, record: bytes
) -> None:
    data = tar_bytes(file_member("a", b"1"))
    digest = store.add_tar(io.BytesIO(data))
    (store.path(digest).parent / "layer.json").write_bytes(record)
    with pytest.raises(TemplateError, match="damaged"):
        store.path(digest)
    assert layers_of(store) == []
    assert store.add_tar(io.BytesIO(data)) == digest
    assert (store.path(digest) / "a").read_bytes() == b"1"


def test_a_layer_of_another_owner_is_refused(store: LayerStore) -> None:
    digest = add_files(store, {"a": b"1"})
    record = store.path(digest).parent / "layer.json"
    table = json.loads(record.read_bytes())
    record.write_text(json.dumps({**table, "owner": [7, 7]}))
    with pytest.raises(TemplateError, match="damaged"):
        store.path(digest)
    record.write_text(json.dumps(table))
    store.path(digest)


def test_missing_layers_and_bad_digests_are_typed_errors(store: LayerStore) -> None:
    for call in (store.path, lambda digest: store.export_tar(digest, io.BytesIO())):
        with pytest.raises(TemplateError, match="no such layer"):
            call(f"sha256:{'a' * 64}")
        with pytest.raises(TemplateError, match="not a layer digest"):
            call("sha256:../../etc")


def test_what_a_killed_process_left_is_swept_and_living_work_is_not(store: LayerStore) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from etude.sandbox.images.image_store import LayerStore\n"
        "with LayerStore(Path(sys.argv[1])).scratch() as folder:\n"
        "    (folder / 'half').write_bytes(b'x'); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(store.root)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        LayerStore(store.root)
        assert len(leftovers(store)) == 1
    finally:
        process.kill()
        process.communicate()
    LayerStore(store.root)
    assert leftovers(store) == []


def test_a_store_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceError, match="layer store"):
        LayerStore(tmp_path / "file")


PARTS = st.sampled_from(["a", "b", "c", "é", ".wh.a", ".wh.b", ".wh..wh..opq", "..", "."])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from(
    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
)
MEMBERS = st.builds(
    lambda name, kind, mode, link: member(name, kind, mode, link), PATHS, KINDS, st.integers(0, 0o7777), PATHS
)


@given(st.lists(MEMBERS, max_size=12))
def test_any_archive_is_a_layer_that_survives_packing_or_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tarfile.TarInfo]
) -> None:
    base = tmp_path_factory.mktemp("any")
    store = LayerStore(base / "store")
    try:
        digest = add(store, *rows)
    except TemplateError:
        digest = None
    assert [path.name for path in base.iterdir()] == ["store"]
    assert leftovers(store) == []
    if digest is None:
        return
    packed = export(store, digest)
    again = store.add_tar(io.BytesIO(packed))
    assert export(store, again) == packed
    assert tree(store.path(again)) == tree(store.path(digest))


def test_equal_layers_are_packed_to_equal_bytes_and_hide_what_they_hid(store: LayerStore) -> None:
    rows = [file_member(".wh..wh..opq", b""), file_member("b", b"1"), file_member("a/.wh.x", b"")]
    first, second = add(store, *rows), add(store, *reversed(rows))
    packed = export(store, first)
    assert first != second and export(store, second) == packed
    again = store.path(store.add_tar(io.BytesIO(packed)))
    assert os.getxattr(again, OPAQUE_XATTR) == b"y"
    assert stat.S_ISCHR((again / "a/x").lstat().st_mode)


@pytest.mark.slow
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3}){0,3}", fullmatch=True), st.binary(max_size=50), max_size=8
    )
)
def test_files_come_out_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    kept = {
        name: data for name, data in files.items() if not any(other.startswith(f"{name}/") for other in files)
    }
    store = LayerStore(tmp_path_factory.mktemp("files"))
    root = store.path(store.add_tar(io.BytesIO(layer_bytes(kept))))
    assert {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    } == kept


def in_overlay(folder: Path, layers: list[Path], script: str) -> str:
    """What a shell prints in an overlay of layers, highest first, with `folder/upper` on top."""
    for name in ("upper", "work", "mnt"):
        (folder / name).mkdir()
    options = f"lowerdir={':'.join(map(str, layers))},upperdir=upper,workdir=work,userxattr"
    command = f"cd {folder} && mount -t overlay o -o {options} mnt && cd mnt || exit 99\n{script}"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", command], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 99 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no overlay in a user namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_overlayfs_mounts_the_layers_as_a_user_would(store: LayerStore, tmp_path: Path) -> None:
    lower = store.path(add_files(store, {"etc/gone": b"1", "etc/kept": b"2", "var/old": b"3"}))
    upper = root_of(
        store,
        file_member("etc/.wh.gone", b""),
        file_member("var/.wh..wh..opq", b""),
        file_member("var/new", b"4"),
    )
    found = in_overlay(tmp_path, [upper, lower], "find . -type f | sort")
    assert found.split() == ["./etc/kept", "./var/new"]


def test_directories_that_no_entry_names_count_too(store: LayerStore) -> None:
    """Few entries with deep paths would else make as many directories as a disk has room for."""
    deep = [file_member("/".join(f"{number}" for _ in range(20)), b"") for number in range(3)]
    with pytest.raises(TemplateError, match="more than 30 entries"):
        store.add_tar(io.BytesIO(tar_bytes(*deep)), max_entries=30)
    assert layers_of(store) == []
    store.add_tar(io.BytesIO(tar_bytes(*deep)), max_entries=60)


def test_a_layer_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, synced = LayerStore(tmp_path / "layers"), list[bool]()

    def sync(path: Path) -> None:
        assert (path / "layer.json").exists() and (path / "root" / "a").read_bytes() == b"x"
        synced.append(bool(layers_of(store)))

    monkeypatch.setattr(image_store, "sync_file_system", sync)
    add_files(store, {"a": b"x"})
    assert synced == [False] and len(layers_of(store)) == 1
