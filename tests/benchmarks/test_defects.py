"""The list of defects matches the source."""

from pathlib import Path

from benchmarks.defects import read_defects


def test_each_defect_is_one_change_of_the_source_and_names_tests_that_exist() -> None:
    for defect in read_defects():
        assert defect.old != defect.new
        assert all(Path(place).exists() for place in defect.tests), defect.name
