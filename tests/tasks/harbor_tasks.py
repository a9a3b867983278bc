"""Harbor tasks of different kinds, written from Harbor's documentation and its model of `task.toml` alone.

Each runs on the programs of the sandboxes' host (`docker_image = "host"`) unless another image is named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Files = dict[str, str | bytes]

REWARD_TEXT = """#!/bin/sh
if grep -qx hello greeting.txt; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""
SOLVE_TEXT = "#!/bin/sh\necho hello > greeting.txt\n"


def write_task(
    directory: Path,
    test: str = REWARD_TEXT,
    solve: str | None = SOLVE_TEXT,
    toml: str = "",
    files: Files | None = None,
    image: str = "host",
) -> Path:
    """Writes a task directory. `toml`: further lines, of which the first ones belong to [environment]."""
    texts: Files = {
        "task.toml": f'schema_version = "1.4"\n[environment]\ndocker_image = "{image}"\n{toml}',
        "instruction.md": "Write hello into greeting.txt.\n",
        "tests/test.sh": test,
        **({} if solve is None else {"solution/solve.sh": solve}),
        **(files or {}),
    }
    for path, content in texts.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def _greeting(directory: Path, image: str) -> None:
    write_task(directory, image=image)


def _json_of_several(directory: Path, image: str) -> None:
    """Rewards by name, of which `reward` counts."""
    test = """#!/bin/sh
printf '{"reward": %d, "lines": %d}' "$(grep -cx hello greeting.txt)" "$(wc -l < greeting.txt || echo 0)" \\
    > /logs/verifier/reward.json
"""
    write_task(directory, test, image=image)


def _binary(directory: Path, image: str) -> None:
    """A file of any bytes in tests/ and in the workspace."""
    test = """#!/bin/sh
if cmp -s /tests/wanted.bin answer.bin; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
    data = bytes(range(256))
    files: Files = {"tests/wanted.bin": data, "solution/answer.bin": data}
    write_task(directory, test, "#!/bin/sh\ncp /solution/answer.bin .\n", files=files, image=image)


def _links_and_modes(directory: Path, image: str) -> None:
    """A program of tests/ behind a link, and an answer that must be executable."""
    test = "#!/bin/sh\n/tests/check ./answer.sh\n"
    check = """#!/bin/sh
[ "$("$1")" = right ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
    solve = "#!/bin/sh\nprintf '#!/bin/sh\\necho right\\n' > answer.sh; chmod +x answer.sh\n"
    write_task(directory, test, solve, files={"tests/lib/check.sh": check}, image=image)
    (directory / "tests/lib/check.sh").chmod(0o755)
    (directory / "tests/check").symlink_to("lib/check.sh")


def _variables(directory: Path, image: str) -> None:
    """Variables of the verifier and of the solution, with a default."""
    toml = '[verifier]\nenv = { WANTED = "${ETUDE_TESTS_UNSET:-blue}" }\n[solution.env]\nCOLOUR = "blue"\n'
    test = """#!/bin/sh
if [ "$(cat colour.txt)" = "$WANTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
    write_task(directory, test, '#!/bin/sh\nprintf "$COLOUR" > colour.txt\n', toml, image=image)


def _python(directory: Path, image: str) -> None:
    """Tests in Python, over a module of the agent's, in the tests' own process."""
    test = """#!/bin/sh
PYTHONPATH=. python3 /tests/test_outputs.py && echo 1 > /logs/verifier/reward.txt \\
    || echo 0 > /logs/verifier/reward.txt
"""
    outputs = "from tally import tally\n\nassert tally([1, 2]) == 3\nassert tally([]) == 0\n"
    solve = "#!/bin/sh\nprintf 'def tally(xs):\\n    return sum(xs)\\n' > tally.py\n"
    write_task(directory, test, solve, files={"tests/test_outputs.py": outputs}, image=image)


def _fraction(directory: Path, image: str) -> None:
    """A reward between 0 and 1."""
    test = """#!/bin/sh
found=$(ls a b c d 2> /dev/null | wc -l)
case $found in 4) echo 1;; 2) echo 0.5;; *) echo 0;; esac > /logs/verifier/reward.txt
"""
    write_task(directory, test, "#!/bin/sh\ntouch a b c d\n", image=image)


def _background(directory: Path, image: str) -> None:
    """What runs on after test.sh writes another reward later, which does not count."""
    test = """#!/bin/sh
(sleep 0.5; echo 0 > /logs/verifier/reward.txt) &
grep -qx hello greeting.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
    write_task(directory, test, image=image)


def _resources(directory: Path, image: str) -> None:
    """Memory, disk and time of its own, by old names and new ones."""
    toml = 'cpus = 1\nmemory = "256M"\nstorage_mb = 256\n[agent]\ntimeout_sec = 60\n'
    test = """#!/bin/sh
if [ "$(stat -c %s big)" = 20000000 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
    solve = "#!/bin/sh\nset -e\nhead -c 100000000 /dev/zero > big; truncate -s 20000000 big\n"
    write_task(directory, test, solve, toml, image=image)


def _deletion(directory: Path, image: str) -> None:
    """A file that the agent has to remove, and a directory in the place of a file."""
    test = """#!/bin/sh
[ ! -e secret.txt ] && [ -f notes/a.txt ] && echo 1 > /logs/verifier/reward.txt \\
    || echo 0 > /logs/verifier/reward.txt
"""
    files: Files = {"environment/workspace/secret.txt": "s\n", "environment/workspace/notes": "n\n"}
    solve = "#!/bin/sh\nrm secret.txt notes; mkdir notes; echo a > notes/a.txt\n"
    write_task(directory, test, solve, files=files, image=image)


KINDS: dict[str, Callable[[Path, str], None]] = {
    "greeting": _greeting,
    "json": _json_of_several,
    "binary": _binary,
    "links": _links_and_modes,
    "variables": _variables,
    "python": _python,
    "fraction": _fraction,
    "background": _background,
    "resources": _resources,
    "deletion": _deletion,
}
"""Ten kinds that can be solved: each by its reference solution, and not by doing nothing."""
