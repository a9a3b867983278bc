import json
import os
from pathlib import Path


def rows():
    path = Path(os.environ["TABLE"])
    return path.read_text().splitlines() if path.exists() else []


def score(right):
    scores = {"reward": float(right), "lines": len(rows())}
    Path("/logs/verifier/reward.json").write_text(json.dumps(scores))
