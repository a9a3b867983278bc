"""Writes `docs/escape.md`: the table of attempts with what `benchmarks/adversary.py` found.

What its file does not have is kept from the page as it is.

    python benchmarks/adversary.py --only sandboxes --only controls --json benchmarks/results/adversary.json
    python -m tests.adversary.escape.document
"""

# ruff: noqa: E501 -- lines of the page are longer than lines of code
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tests.adversary.escape.attempts import ATTEMPTS, GROUPS
from tests.adversary.escape.causes import CAUSES, FOUND_BEFORE
from tests.adversary.escape.holes import HOLES
from tests.adversary.escape.launching import ROOT
from tests.adversary.escape.model import Attempt

PATH = ROOT / "docs" / "escape.md"
RESULTS = ROOT / "benchmarks" / "results" / "adversary.json"
COLUMNS = ("local, root", "local, plain", "gvisor, root", "gvisor, plain", "vm, root", "vm, plain",
           "control, root", "control, plain")  # fmt: skip
_HEAD = """# The escape suite

The suite runs what a hostile program inside a sandbox could try, and names what stops it: {count} attempts of {causes} distinct
causes, on every backend, as root and as a plain user. Run it after a change of a sandbox, on a new kernel, or before you trust
a backend with hostile code:

```
python benchmarks/adversary.py --only sandboxes --only controls   # local
python benchmarks/adversary.py --only guests                      # gvisor and vm, where they are installed
pytest tests/adversary/escape                                     # the same as tests
```

Each attempt has a control. Either the same attempt without its protections must succeed, and must fail again once any single one of
them is restored; or the same act must succeed where it is allowed. Success is judged from outside if possible: canary files, a
host process, listeners, shared memory and settings of the host are checked after each attempt.

- **held**: the attempt failed, and the sandbox and its neighbours continued, or the error named the agent as the cause of the end.
- **HOLE**: it succeeded, or it ended the sandbox and the error blamed the infrastructure. `tests/adversary/escape/holes.py` says
  what would close it; the tests expect it, and fail once it is closed.
- **-**: it was not run, or does not apply: the machine of the last run lacks the kernel feature, or the attempt only reaches a
  guest's own kernel.
- control **succeeds**: without its protections the attempt gets through. **-**: there is no control on that machine, or as that
  user (a plain user cannot do without a user namespace). Controls are of `local`, where single protections can be removed; guests
  are tested with the same programs.

**How causes are counted.** Attempts that one repair would stop together are variants of one cause:
`tests/adversary/escape/causes.py` has one row for each, and the figures count these rows. {new} of the {causes} are of classes that no
earlier adversary had tried here. Zeros are printed with the bound that holds with 95 % confidence, 3 divided by the number of attempts:
[adversary.json](../benchmarks/results/adversary.json).

The attempts are plain programs in `attempts_*.py`; `weakening.py` removes protections for controls. No control harms the host:
settings are opened and not written, the clock is not moved, bombs are counted.

Last run: {when}
"""
_GUESTS = [column for column in COLUMNS if column.startswith(("gvisor", "vm"))]
_ROW = re.compile(r"^\| (?P<name>.+?) \| (?P<protects>.+?) \| (?P<results>.+) \|$")
_WORDS = {"held": "held", "got through": "HOLE", "skipped": "-"}


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
    parts = [
        _HEAD.format(count=len(ATTEMPTS), causes=len(CAUSES), new=len(CAUSES) - len(FOUND_BEFORE), when=when)
    ]
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


def results_of(stored: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """attempt -> column -> result, as the benchmark's file has them."""
    found: dict[str, dict[str, str]] = {}
    for group in ("sandboxes", "guests", "controls"):
        for attempts in stored["peers"].get(group, {}).values():
            for name, places in attempts.items():
                for place, ended in places.items():
                    column = place.replace("local", "control") if group == "controls" else place
                    word = {"held": "succeeds"}.get(ended, "-") if group == "controls" else _WORDS[ended]
                    found.setdefault(name, {})[column] = word
    return found


def _guests_in(stored: Mapping[str, Any]) -> str:
    """What was tried in guests, in words."""
    if "guests" not in stored["parts"]:
        return " Guests were not tried with it: their columns are of earlier runs, and no figure counts them."
    part, figures = stored["parts"]["guests"], stored["figures"]
    tried = [(place, figures.get("guest_tried_" + place.replace(", ", "_"), 0)) for place in _GUESTS]
    words = "; ".join(f"{place}: {number or 'not run'}" for place, number in tried)
    bound = figures.get("guest_escapes_below")
    ended = "" if bound is None else f": fewer than {100 * bound:.1f} % with 95 % confidence"
    return (
        f" Guests: {part['time']}, commit {part['commit'][:7]}, "
        f"{figures['guest_escapes']} causes of escapes in attempts on {words}{ended}."
    )


def main() -> None:
    """See the module."""
    results = results_in(PATH.read_text(encoding="utf-8"))
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    if "guests" in stored["parts"]:
        results = {name: {**row, **dict.fromkeys(_GUESTS, "-")} for name, row in results.items()}
    for name, columns in results_of(stored).items():
        results.setdefault(name, {}).update(columns)
    part, machine, figures = stored["parts"]["sandboxes"], stored["machine"], stored["figures"]
    num_tries = sum(value for name, value in figures.items() if name.startswith("tried_local"))
    ended = f"{figures['escapes']} causes of escapes in {num_tries} attempts on `local`"
    if "escapes_below" in figures:
        ended += f": fewer than {100 * figures['escapes_below']:.1f} % with 95 % confidence"
    when = f"{part['time']}, {machine['cpu']}, commit {part['commit'][:7]}. {ended}.{_guests_in(stored)}"
    PATH.write_text(page(results, when), encoding="utf-8")


if __name__ == "__main__":
    main()
