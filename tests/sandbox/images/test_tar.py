"""The strict reader and the deterministic writer, against the standard library's."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.tar import MAX_MTIME_S, Entry, TarReader, TarWriter
from tests.sandbox.images.image_builders import file_member, member, tar_bytes

NAMES = st.binary(min_size=1, max_size=300).map(lambda raw: raw.replace(b"\0", b"n").replace(b"/", b"s"))
FILES = st.builds(
    lambda name, mode, mtime, data: (Entry(name, "file", mode, mtime, len(data)), data),
    NAMES, st.integers(0, 0o7777), st.integers(0, MAX_MTIME_S), st.binary(max_size=1500),
)  # fmt: skip
LINKS = st.builds(lambda name, link: (Entry(name, "symlink", 0o777, 0, 0, link), b""), NAMES, NAMES)


def read_all(data: bytes) -> list[tuple[Entry, bytes]]:
    reader = TarReader(io.BytesIO(data), "test")
    return [(entry, reader.read()) for entry in reader]


def write_all(rows: list[tuple[Entry, bytes]]) -> bytes:
    target = io.BytesIO()
    writer = TarWriter(target)
    for entry, data in rows:
        writer.add(entry, io.BytesIO(data))
    writer.close()
    return target.getvalue()


@given(st.lists(FILES | LINKS, max_size=5))
def test_what_is_written_is_read_again(rows: list[tuple[Entry, bytes]]) -> None:
    assert read_all(write_all(rows)) == rows


@given(st.lists(FILES | LINKS, max_size=5))
def test_the_standard_library_reads_what_is_written(rows: list[tuple[Entry, bytes]]) -> None:
    with tarfile.open(fileobj=io.BytesIO(write_all(rows)), errors="surrogateescape") as archive:
        members = archive.getmembers()
        names = [info.name.encode(errors="surrogateescape") for info in members]
        contents = [archive.extractfile(info).read() for info in members if info.isreg()]  # type: ignore[union-attr]
    assert names == [entry.name for entry, _ in rows]
    assert contents == [data for entry, data in rows if entry.kind == "file"]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_archives_of_the_standard_library_are_read(form: int) -> None:
    long = "d/" * 60 + "name"
    link = member("link", tarfile.SYMTYPE, link="t" * (90 if form == tarfile.USTAR_FORMAT else 300))
    data = tar_bytes(file_member(long, b"data"), link, member("dir", tarfile.DIRTYPE, 0o755), form=form)
    assert [(entry.name.decode(), entry.kind, body) for entry, body in read_all(data)] == [
        (long, "file", b"data"),
        ("link", "symlink", b""),
        ("dir/", "dir", b""),
    ]


def test_fractions_of_seconds_are_dropped() -> None:
    info = member("x")
    info.mtime = 7.75  # type: ignore[assignment]
    assert read_all(tar_bytes(info))[0][0].mtime_s == 7


@given(st.integers(0, 10239))
def test_an_archive_cut_anywhere_is_refused(length: int) -> None:
    data = tar_bytes(
        file_member("a", b"x" * 600),
        file_member("é" * 80, b"y" * 700),
        member("s", tarfile.SYMTYPE, link="a"),
    )
    content_end = len(data.rstrip(b"\0")) + (-len(data.rstrip(b"\0")) % 512)
    if length >= content_end + 512:
        return  # only the padding after the end is missing
    with pytest.raises(TemplateError):
        read_all(data[:length])


@given(st.binary(max_size=2000))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(TemplateError):
        read_all(b"g" + data)


@given(st.integers(0, 511), st.integers(1, 255))
def test_a_changed_header_in_mid_archive_is_not_taken_for_the_end(at: int, by: int) -> None:
    data = bytearray(tar_bytes(file_member("a", b"x"), file_member("b", b"y")))
    data[1024 + at] = (data[1024 + at] + by) % 256
    try:
        rows = read_all(bytes(data))
    except TemplateError:
        return
    # The checksum's own padding is the only place that may change unnoticed.
    assert len(rows) == 2
    assert 148 <= at < 156


@pytest.mark.parametrize(
    ("kind", "reason"), [(b"S", "type"), (b"M", "type"), (b"D", "type")], ids=["sparse", "volume", "dump"]
)
def test_unknown_types_are_refused(kind: bytes, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason):
        read_all(tar_bytes(member("x", kind)))


def test_a_header_of_impossible_size_is_refused_without_reading_it() -> None:
    info = member("x", tarfile.XHDTYPE)
    info.size = 1 << 40
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(TemplateError, match="impossible size"):
        read_all(header)


class CountingStream(io.BytesIO):
    """Counts calls and bytes."""

    num_reads = 0
    num_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.num_reads += 1
        self.num_bytes += len(data)
        return data


@given(st.integers(0, 200), st.integers(0, 3000))
def test_every_byte_is_read_once(count: int, size: int) -> None:
    data = tar_bytes(*(file_member(f"{number}", bytes(size)) for number in range(count)))
    stream = CountingStream(data)
    assert len(list(TarReader(stream, "test"))) == count
    assert stream.num_bytes <= len(data)
    assert stream.num_reads <= 3 * count + 1
