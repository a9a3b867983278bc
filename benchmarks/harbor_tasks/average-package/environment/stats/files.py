from pathlib import Path

from stats.core import mean


def mean_of_file(path):
    return mean([int(cell) for cell in Path(path).read_text().split(",")])
