"""A journal of checksummed lines: torn ends are dropped, damage is an error, one process writes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from etude.errors import StoreError
from etude.kit.journal import LineJournal, read_lines


def checksum(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=8).hexdigest()


LINES = [{"a": 1}, {"b": "ü\n"}, {}]


def written(path: Path) -> bytes:
    journal = LineJournal.create(path, checksum)
    for line in LINES:
        journal.append(line)
    journal.sync()
    journal.close()
    return path.read_bytes()


def test_a_journal_is_taken_up_with_its_lines_and_goes_on(tmp_path: Path) -> None:
    written(tmp_path / "j")
    journal, lines = LineJournal.resume(tmp_path / "j", checksum)
    assert lines == LINES
    journal.append({"c": 3})
    journal.close()
    assert read_lines(tmp_path / "j", checksum)[0] == [*LINES, {"c": 3}]


def test_a_line_torn_anywhere_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = written(path)
    lengths = [len(line) for line in whole.splitlines(keepends=True)]
    for cut in range(1, lengths[-1] + 1):
        path.write_bytes(whole[:-cut])
        journal, lines = LineJournal.resume(path, checksum)
        journal.close()
        assert lines == LINES[:-1]
        assert path.stat().st_size == sum(lengths[:-1])


def test_damage_before_the_last_line_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    whole = written(path)
    for place in range(whole.rfind(b"\n", 0, -1)):
        damaged = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match="damaged"):
            LineJournal.resume(path, checksum)
        assert path.read_bytes() == damaged


def test_a_file_that_is_no_journal_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    journal, lines = LineJournal.resume(path, checksum)
    journal.close()
    assert (lines, path.read_text()) == ([], "mine")


def test_one_at_a_time_writes_and_a_journal_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = LineJournal.create(path, checksum)
    with pytest.raises(BlockingIOError):
        LineJournal.resume(path, checksum)
    with pytest.raises(FileExistsError):
        LineJournal.create(path, checksum)
    journal.remove()
    journal.remove()
    with pytest.raises(FileNotFoundError):
        LineJournal.resume(path, checksum)
    for use in (journal.sync, lambda: journal.append({})):
        with pytest.raises(StoreError, match="cannot be written"):
            use()
