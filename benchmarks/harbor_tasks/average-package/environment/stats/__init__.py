from stats.core import mean
from stats.files import mean_of_file

__all__ = ["mean", "mean_of_file"]
