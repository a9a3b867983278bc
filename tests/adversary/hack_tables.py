"""All hacks."""

from __future__ import annotations

from tests.adversary.hacks import Hack
from tests.adversary.hacks_bending import LIBRARY, TESTS
from tests.adversary.hacks_files import FILES
from tests.adversary.hacks_reading import READING
from tests.adversary.hacks_values import VALUES
from tests.adversary.hacks_verdicts import GUESSES, VERDICTS

HACKS: tuple[Hack, ...] = (*READING, *VALUES, *LIBRARY, *TESTS, *VERDICTS, *GUESSES, *FILES)
