"""Puts benchmarks/ on the import path: its scripts import each other by plain names."""

import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(_BENCHMARKS), str(_BENCHMARKS / "inference_workers")]
