"""Layers: copied, packed, unpacked and removed, whatever an agent put into them."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.inside.layers import copy_tree, merge_tree, remove_tree
from etude.sandbox.inside.packing import OPAQUE, LayerError, pack_tree, unpack_tree

Shape = dict[str, "Leaf | Shape"]
FLAGS = os.O_RDONLY | os.O_DIRECTORY


@dataclass(frozen=True)
class Leaf:
    """What is no directory."""

    kind: str
    data: bytes = b""
    mode: int = 0o644
    time_ns: int = 10**18 + 123_456_789


NAMES = st.one_of(
    st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=8),
    st.sampled_from([".wh.a", ".wh..wh..opq", ".wh.", "a", "b", " ", "-", "\\", "\n", "\udcff", "x" * 120]),
).filter(lambda name: name not in (".", "..") and len(os.fsencode(name)) < 200)
LEAVES = st.builds(
    Leaf,
    st.sampled_from(["file", "file", "link", "fifo"]),
    st.binary(max_size=40),
    st.sampled_from([0o644, 0o755, 0o600, 0o444, 0o000]),
    st.integers(-(10**18), 2 * 10**18),
)
SHAPES: st.SearchStrategy[Shape] = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(NAMES, st.one_of(LEAVES, inner), max_size=4),
    max_leaves=12,
)


def build(root: Path, shape: Shape) -> None:
    for name, entry in shape.items():
        path = root / name
        if isinstance(entry, dict):
            path.mkdir()
            build(path, entry)
            path.chmod(0o750)
            os.utime(path, ns=(5, 7_000_000_001))
            continue
        if entry.kind == "file":
            path.write_bytes(entry.data)
            path.chmod(entry.mode)
        elif entry.kind == "link":
            path.symlink_to(os.fsdecode(b"to/\xff" + entry.data.replace(b"\0", b"x")))
        else:
            os.mkfifo(path)
            path.chmod(entry.mode)
        os.utime(path, ns=(entry.time_ns, entry.time_ns), follow_symlinks=False)


Row = tuple[str, int, object, int]


def rows(root: Path) -> dict[str, Row]:
    """Everything below a directory: kind, mode, contents, time; hard links by the name that comes first."""
    found: dict[str, Row] = {}
    first: dict[int, str] = {}
    for folder, names, files in os.walk(root):
        for name in sorted([*names, *files]):
            path = Path(folder, name)
            status = path.lstat()
            kind = stat.S_IFMT(status.st_mode)
            contents: object = None
            if stat.S_ISREG(status.st_mode):
                contents = path.read_bytes(), first.setdefault(status.st_ino, str(path.relative_to(root)))
            elif stat.S_ISLNK(status.st_mode):
                contents = str(path.readlink())
            elif stat.S_ISDIR(status.st_mode):
                contents = OPAQUE in os.listxattr(path)
            timeless = stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode)
            time_ns = 0 if timeless else status.st_mtime_ns
            found[str(path.relative_to(root))] = oct(kind), stat.S_IMODE(status.st_mode), contents, time_ns
    return found


def copied(source: Path, target: Path) -> None:
    target.mkdir()
    here, there = os.open(source, FLAGS), os.open(target, FLAGS)
    try:
        copy_tree(here, there)
    finally:
        os.close(here)
        os.close(there)


def repacked(source: Path, target: Path) -> None:
    target.mkdir()
    packed = io.BytesIO()
    pack_tree(str(source), packed)
    packed.seek(0)
    unpack_tree(packed, str(target))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes whiteouts outside of a sandbox")
WAYS = [copied, repacked]
both_ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
Way = Callable[[Path, Path], None]


@pytest.mark.slow
@both_ways
@given(shape=SHAPES)
def test_any_tree_comes_back_as_it_was(way: Way, shape: Shape) -> None:
    with TemporaryDirectory() as directory:
        source, target = Path(directory, "source"), Path(directory, "target")
        source.mkdir()
        build(source, shape)
        if os.geteuid() != 0 and any(
            not path.is_dir() and not os.access(path, os.R_OK) for path in source.rglob("*")
        ):
            return
        way(source, target)
        assert rows(target) == rows(source)
        remove_tree(str(target))
        assert sorted(path.name for path in Path(directory).iterdir()) == ["source"]


@both_ways
@needs_root
def test_whiteouts_and_opaque_directories_are_kept(way: Way, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d").mkdir(parents=True)
    os.setxattr(source / "d", OPAQUE, b"y")
    for name in ("gone", "d/gone", ".wh.odd"):
        os.mknod(source / name, stat.S_IFCHR, 0)
    way(source, target)
    assert rows(target) == rows(source)
    assert (target / "d/gone").lstat().st_rdev == 0


@both_ways
def test_hard_links_stay_one_file(way: Way, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d").mkdir(parents=True)
    (source / "a").write_bytes(os.urandom(100_000))
    for name in ("b", "d/c"):
        (source / name).hardlink_to(source / "a")
    way(source, target)
    assert len({(target / name).stat().st_ino for name in ("a", "b", "d/c")}) == 1
    assert rows(target) == rows(source)


@both_ways
def test_large_files_cross_whole_with_their_times(way: Way, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(5_000_001))
    way(source, target)
    assert rows(target) == rows(source)


@pytest.mark.slow
def test_holes_stay_holes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.write(b"head")
        file.seek(300 << 20)
        file.write(b"middle")
        file.truncate(900 << 20)
    with (source / "hole").open("wb") as file:
        file.truncate(500 << 20)
    copied(source, tmp_path / "target")
    with (tmp_path / "target/sparse").open("rb") as file:
        assert file.read(5) == b"head\0"
        file.seek(300 << 20)
        assert file.read(7) == b"middle\0"
    for name in ("sparse", "hole"):
        status = (tmp_path / "target" / name).stat()
        assert status.st_size == (source / name).stat().st_size
        assert status.st_blocks * 512 < 1 << 20
    with pytest.raises(LayerError, match="holes"):
        pack_tree(str(source), io.BytesIO())


@pytest.mark.slow
def test_a_thousand_directories_side_by_side_need_few_descriptors(tmp_path: Path) -> None:
    import resource

    source = tmp_path / "source"
    for number in range(1000):
        (source / f"d{number}" / "e").mkdir(parents=True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 128), limits[1]))
    try:
        copied(source, tmp_path / "one")
        repacked(source, tmp_path / "two")
        remove_tree(str(tmp_path / "one"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list((tmp_path / "two").rglob("*"))) == 2000
    assert not (tmp_path / "one").exists()


def deep(folder: Path, depth: int) -> None:
    """Directories inside each other, deeper than a path can name."""
    here = os.open(folder, FLAGS)
    for _ in range(depth):
        os.mkdir("deeper", dir_fd=here)
        inner = os.open("deeper", FLAGS, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("leaf", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)


@pytest.mark.slow
def test_trees_deeper_than_any_path_are_copied_and_removed_and_not_packed(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    deep(source, 2000)
    try:
        copied(source, target)
        with pytest.raises(LayerError, match="bytes"):
            pack_tree(str(target), io.BytesIO())
    finally:
        remove_tree(str(target))
        remove_tree(str(source))
    assert list(tmp_path.iterdir()) == []


def test_removing_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    remove_tree(str(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


def test_directories_without_permissions_are_copied_and_removed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "locked").mkdir(parents=True)
    (source / "locked/f").write_text("x")
    (source / "locked").chmod(0o555)
    copied(source, tmp_path / "one")
    repacked(source, tmp_path / "two")
    assert rows(tmp_path / "one") == rows(source) == rows(tmp_path / "two")
    for name in ("source", "one", "two"):
        remove_tree(str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_sockets_are_left_out(tmp_path: Path) -> None:
    import socket

    source = tmp_path / "source"
    source.mkdir()
    (source / "f").write_text("x")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(source / "s"))
        copied(source, tmp_path / "one")
        repacked(source, tmp_path / "two")
    assert list(rows(tmp_path / "one")) == list(rows(tmp_path / "two")) == ["f"]


def archive(*members: tarfile.TarInfo, data: bytes = b"") -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for member in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    file.seek(0)
    return file


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "members",
    [
        [member("../x")],
        [member("a/../../x")],
        [member("/x")],
        [member("a//x")],
        [member(".")],
        [member(".wh...")],
        [member(".wh.")],
        [member("l", tarfile.SYMTYPE, ".."), member("l/x")],
        [member("l", tarfile.SYMTYPE, "/"), member("l/tmp/x")],
        [member("h", tarfile.LNKTYPE, "../secret")],
        [member("h", tarfile.LNKTYPE, "/etc/passwd")],
        [member("l", tarfile.SYMTYPE, ".."), member("h", tarfile.LNKTYPE, "l/secret")],
        [member("b", tarfile.BLKTYPE)],
        [member("c", tarfile.CHRTYPE)],
    ],
    ids=lambda members: "+".join(f"{m.name}{m.linkname and '->' + m.linkname}" for m in members),
)
def test_what_reaches_outside_is_refused(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root").mkdir()
    with pytest.raises(LayerError):
        unpack_tree(archive(*members, data=b"x"), str(tmp_path / "root"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "secret"]
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_second_member_of_one_name_is_refused_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(OSError):
        unpack_tree(
            archive(member("l", tarfile.SYMTYPE, "../made"), member("l"), data=b"x"), str(tmp_path / "root")
        )
    assert not (tmp_path / "made").exists()


@given(st.integers(1, 30_000), st.binary(min_size=1, max_size=3))
def test_a_torn_layer_is_refused_or_lacks_its_end(cut: int, flip: bytes) -> None:
    """Whatever is cut or flipped: an error, or files that lie below the root. Digests tell the rest."""
    with TemporaryDirectory() as directory:
        source, target = Path(directory, "source"), Path(directory, "target")
        (source / "d").mkdir(parents=True)
        target.mkdir()
        for name in ("a", "d/b", "d/c"):
            (source / name).write_bytes(b"x" * 3000)
        packed = io.BytesIO()
        pack_tree(str(source), packed)
        data = bytearray(packed.getvalue()[:cut])
        data[len(data) // 2 : len(data) // 2 + len(flip)] = flip
        with contextlib.suppress(LayerError, OSError):
            unpack_tree(io.BytesIO(bytes(data)), str(target))
        assert sorted(path.name for path in Path(directory).iterdir()) == ["source", "target"]


def test_packing_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("b", "a", "c/d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    one, two = io.BytesIO(), io.BytesIO()
    pack_tree(str(tmp_path), one)
    pack_tree(str(tmp_path), two)
    assert one.getvalue() == two.getvalue()
    with tarfile.open(fileobj=io.BytesIO(one.getvalue())) as tar:
        assert tar.getnames() == ["a", "b", "c", "c/d"]


@needs_root
def test_merged_layers_hide_and_show_what_they_did_one_by_one(tmp_path: Path) -> None:
    lower, upper, trash = tmp_path / "lower", tmp_path / "upper", tmp_path / "trash"
    for folder in (lower / "both", lower / "replaced", lower / "to_file", upper / "both", upper / "replaced",
                   upper / "from_file", upper / "from_whiteout", upper / "new", trash):  # fmt: skip
        folder.mkdir(parents=True)
    for name in ("both/low", "both/gone", "replaced/low", "to_file/low", "from_file", "stays"):
        (lower / name).write_text("low")
    os.mknod(lower / "from_whiteout", stat.S_IFCHR, 0)
    for name in ("both/up", "replaced/up", "to_file", "from_file/up", "from_whiteout/up", "new/up"):
        (upper / name).write_text("up")
    os.mknod(upper / "both/gone", stat.S_IFCHR, 0)
    os.setxattr(upper / "replaced", OPAQUE, b"y")
    (upper / "both").chmod(0o711)
    descriptors = [os.open(folder, FLAGS) for folder in (upper, lower, trash)]
    merge_tree(*descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    found = rows(lower)
    files = {name: path[2][0] for name, path in found.items() if isinstance(path[2], tuple)}
    assert files == {
        "both/low": b"low", "both/up": b"up", "replaced/up": b"up", "to_file": b"up", "from_file/up": b"up",
        "from_whiteout/up": b"up", "new/up": b"up", "stays": b"low",
    }  # fmt: skip
    assert stat.S_ISCHR((lower / "both/gone").lstat().st_mode)
    assert found["both"][1] == 0o711
    # What hid a directory of the template goes on hiding it.
    opaque = {name for name, row in found.items() if row[2] is True}
    assert opaque == {"replaced", "from_file", "from_whiteout"}
