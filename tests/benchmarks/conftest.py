"""Benchmarks are scripts: they find each other beside themselves, and so must their tests."""

import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(_BENCHMARKS), str(_BENCHMARKS / "inference_workers")]
