"""Writes `docs/escape.md`: the table of attempts with what was found on this machine.

Run as root; what is not measured anew is kept from the page as it is.

    python -m tests.adversary.escape.document             everything (minutes)
    python -m tests.adversary.escape.document local       one backend, with the controls
    python -m tests.adversary.escape.document vm/plain    one user (XDG_STATE_HOME: where it finds the image)
"""

# ruff: noqa: E501 -- a page has one line for each paragraph
from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from tests.adversary.escape.attempts import ATTEMPTS, GROUPS
from tests.adversary.escape.holes import HOLES
from tests.adversary.escape.launching import ROOT, start
from tests.adversary.escape.model import USERS, Attempt
from tests.adversary.escape.run import names_for

PATH = ROOT / "docs" / "escape.md"
COLUMNS = ("local, root", "local, plain", "gvisor, root", "gvisor, plain", "vm, root", "vm, plain",
           "control, root", "control, plain")  # fmt: skip
_HEAD = """# The escape suite

What a hostile program inside a sandbox tries, and what stops it: {count} attempts, on every backend, as root and as a plain user. Each has a control: the same attempt with its protections taken away, must succeed, and must fail again once any one of them is put back. Success is judged from outside where it can be: canary files, a host process, listeners, shared memory and settings of the host are looked at after each attempt.

```
pytest tests/adversary/escape                                    # local, with the controls
pytest tests/adversary/escape -m slow                            # gvisor and vm, where they are installed
python -m tests.adversary.escape.document                        # writes this page
```

- **held**: the attempt failed, and the sandbox and its neighbours went on, or the error said that the agent ended it.
- **HOLE**: it succeeded, or the sandbox died of it and the error blamed the infrastructure. `tests/adversary/escape/holes.py` says what would close it; the tests expect it, and fail once it is closed.
- **-**: it means nothing here: the kernel feature is missing on the machine of the last run, or what it opens is a guest's own kernel.
- control **succeeds**: without its protections it gets through. **-**: there is no control on that machine, or as that user (a plain user cannot do without a user namespace).

The attempts are plain programs in `attempts_*.py`; what is taken away for a control is in `weakening.py`. Nothing in a control harms the host: settings are opened and not written, the clock is not moved, bombs are counted.

Last run: {when}
"""
_ROW = re.compile(r"^\| (?P<name>.+?) \| (?P<protects>.+?) \| (?P<results>.+) \|$")
_VERDICTS = {"held": "held", "escaped": "HOLE", "lost": "HOLE", "impossible": "-", "broken": "HOLE"}


def results_in(text: str) -> dict[str, dict[str, str]]:
    """attempt -> column -> result, as a page has them."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        match = _ROW.match(line)
        if match is not None and match["name"] in ATTEMPTS:
            found[match["name"]] = dict(zip(COLUMNS, match["results"].split(" | "), strict=True))
    return found


def page(results: dict[str, dict[str, str]], when: str) -> str:
    """The whole page."""
    parts = [_HEAD.format(count=len(ATTEMPTS), when=when)]
    for title, attempts in GROUPS.items():
        parts += [f"\n## {title}\n", "| attempt | stopped by | " + " | ".join(COLUMNS) + " |"]
        parts.append("|" + "---|" * (2 + len(COLUMNS)))
        parts += [_row(attempt, results.get(attempt.name, {})) for attempt in attempts]
    parts += ["\n## Holes\n"]
    known = [
        f"- **{backend}: {name}.** {hole.reason}."
        for backend, holes in HOLES.items()
        for name, hole in holes.items()
    ]
    parts += known or ["None that is known."]
    return "\n".join(parts) + "\n"


def _row(attempt: Attempt, results: dict[str, str]) -> str:
    cells = [results.get(column, "-") for column in COLUMNS]
    return f"| {attempt.name} | {attempt.protects} | " + " | ".join(cells) + " |"


def measure(backends: Sequence[str]) -> dict[str, dict[str, str]]:
    """Runs the attempts on the named backends, and the controls with `local`, one user at a time."""
    results: dict[str, dict[str, str]] = {}
    for backend, _, only in (name.partition("/") for name in backends):
        for user in USERS:
            if only not in ("", user):
                continue
            names = [name for name in names_for(backend) if user in ATTEMPTS[name].users]
            runs = [("attempts", run) for run in start(user, backend, "attempts", names, 1)]
            if backend == "local":
                runs += [("controls", run) for run in start(user, backend, "controls", names, 1)]
            for what, run in runs:
                for name, outcome in run.outcomes().items():
                    if name in ATTEMPTS and what == "attempts":
                        results.setdefault(name, {})[f"{backend}, {user}"] = _VERDICTS[outcome.verdict]
                    elif name in ATTEMPTS:
                        word = "succeeds" if outcome.verdict == "escaped" else "-"
                        known = HOLES["local"].get(name)
                        word = "-" if known is not None and user in known.users else word
                        results.setdefault(name, {})[f"control, {user}"] = word
                run.close()
    return results


def _described() -> str:
    date = datetime.now(UTC).date().isoformat()
    kernel, python = platform.release().split("-")[0], platform.python_version()
    return f"{date}, Linux {kernel}, {platform.machine()}, Python {python}."


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    text = PATH.read_text(encoding="utf-8") if PATH.exists() else ""
    results = results_in(text)
    for name, columns in measure(arguments or ("local", "gvisor", "vm")).items():
        results.setdefault(name, {}).update(columns)
    PATH.write_text(page(results, _described()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
