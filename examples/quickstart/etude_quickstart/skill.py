"""The skill of the scripted expert: probabilities of its habits and mistakes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from etude.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertSkill:
    """Probabilities of independent draws. Raises ConfigError for one outside [0, 1].

    The defaults leave room for improvement by learning: about half of the first edits are right, and a
    failed test run often ends the session.
    """

    right_edit: float = 0.48
    """An edit corrects the bug; otherwise it changes another line, or the right line wrongly."""
    other_line: float = 0.45
    """A wrong edit changes a line that was right."""
    misplaced: float = 0.1
    """A wrong edit puts the right text into another line."""
    idle: float = 0.25
    """A wrong edit rewrites a line unchanged."""
    retry: float = 0.45
    """Failing tests after an edit lead to another edit; otherwise the expert gives up."""
    right_retry: float = 0.75
    """An edit after a failed one corrects the bug."""
    reread: float = 0.3
    """Before another edit the file is read again."""
    rewrite: float = 0.15
    """An edit writes the function's whole body."""
    blind_edit: float = 0.03
    """A file is edited without having been read."""
    parallel: float = 0.4
    """A further step goes into the same message, if it needs none of its results."""
    read_ahead: float = 0.15
    """A further file is read in the same message."""
    list_files: float = 0.35
    """The first look lists files; otherwise it greps for the function."""
    test_first: float = 0.08
    """The tests are run first of all."""
    untested_finish: float = 0.06
    """The session ends after an edit without a test run."""
    search_replace: float = 0.12
    """An edit names the old text instead of the line."""
    pointless_look: float = 0.03
    """A useless look is inserted."""
    malformed: float = 0.04
    """A call is malformed."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(
                    "is a probability",
                    field=f"skill.{entry.name}",
                    received=value,
                    fix="a number from 0 to 1",
                )


PERFECT_SKILL = ExpertSkill(
    right_edit=1.0,
    other_line=0.0,
    misplaced=0.0,
    idle=0.0,
    retry=1.0,
    right_retry=1.0,
    blind_edit=0.0,
    test_first=0.0,
    untested_finish=0.0,
    pointless_look=0.0,
    malformed=0.0,
)
"""The skill without mistakes."""
