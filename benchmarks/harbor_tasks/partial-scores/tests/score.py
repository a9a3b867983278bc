import json
from pathlib import Path


def lines(name):
    path = Path("/work", name)
    return path.read_text().split() if path.exists() else []


squares = lines("squares.txt") == [str(n**2) for n in range(1, 5)]
cubes = lines("cubes.txt") == [str(n**3) for n in range(1, 5)]
scores = {"squares": int(squares), "cubes": int(cubes), "reward": (squares + cubes) / 2}
Path("/logs/verifier/reward.json").write_text(json.dumps(scores))
