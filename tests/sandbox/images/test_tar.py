"""Untrusted archives: read with the standard library, which by itself takes damage for the end."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.archives import open_archive
from tests.sandbox.images.image_builders import file_member, member, tar_bytes


def read_all(data: bytes) -> list[tuple[str, bytes, bytes]]:
    """Name, type and contents of each member."""
    with open_archive(io.BytesIO(data), "test") as archive:
        return [
            (row.name, row.type, archive.extractfile(row).read() if row.isreg() else b"")  # type: ignore[union-attr]
            for row in archive
        ]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_archives_of_all_formats_are_read(form: int) -> None:
    long = "d/" * 60 + "name"
    link = member("link", tarfile.SYMTYPE, link="t" * (90 if form == tarfile.USTAR_FORMAT else 300))
    data = tar_bytes(file_member(long, b"data"), link, member("dir", tarfile.DIRTYPE, 0o755), form=form)
    assert read_all(data) == [
        (long, tarfile.REGTYPE, b"data"),
        ("link", tarfile.SYMTYPE, b""),
        ("dir", tarfile.DIRTYPE, b""),
    ]


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


def test_a_header_of_impossible_size_is_refused_without_reading_it() -> None:
    info = member("x", tarfile.XHDTYPE)
    info.size = 1 << 40
    header = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(TemplateError, match="impossible size"):
        read_all(header)


def test_a_map_of_holes_is_refused_without_reading_it() -> None:
    info = member("x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    with pytest.raises(TemplateError, match="sparse"):
        read_all(tar_bytes((info, b"")))
