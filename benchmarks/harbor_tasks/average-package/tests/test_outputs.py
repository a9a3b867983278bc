import pytest
import stats
from numbers_expected import EXPECTED


@pytest.mark.parametrize(("values", "mean"), EXPECTED)
def test_mean(values, mean):
    assert stats.mean(values) == mean


def test_file():
    assert stats.mean_of_file("data/numbers.csv") == 2.5


def test_empty():
    with pytest.raises(ValueError):
        stats.mean([])
