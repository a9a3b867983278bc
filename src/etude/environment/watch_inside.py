"""Records the calls of hidden tests to a solution. Runs inside a sandbox, on the reference solution only.

Standard library only: its source is copied into the sandbox with the test file that it watches.
"""

from __future__ import annotations

import dis
import re
import sys
import zlib
from collections.abc import Callable
from types import CodeType, FrameType

CALLS, COMPARED = -1, -2
"""Indices under which a test records digests of its calls, and whether an error was its own."""
_MOST_CALLS = 2000
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__")
"""Their arguments are expected values of a test, not inputs."""


def watch(
    record: Callable[[int, object], None], hidden: frozenset[str]
) -> Callable[[dict[str, object]], None]:
    """Starts watching; returns a function to call with the test module's names when it is fully imported.

    `hidden`: paths of hidden files; every other file below the workspace belongs to the solution.
    """
    calls: list[int] = []

    def is_solution(code: CodeType) -> bool:
        return code.co_filename[:1] not in "/<" and code.co_filename not in hidden

    def see(frame: FrameType, event: str, argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or len(calls) >= _MOST_CALLS or code.co_name == "<module>":
            return
        if is_solution(code) and not (caller is not None and is_solution(caller.f_code)):
            try:
                asked = repr((code.co_name, frame.f_locals if code.co_name not in _COMPARISONS else ()))
            except Exception:
                asked = code.co_name
            calls.append(zlib.crc32(re.sub("0x[0-9a-f]+", "", asked).encode(errors="replace")))

    def is_own(error: BaseException) -> bool:
        """Whether a hidden file's own statement raised it: a comparison that failed, not a lookup."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or isinstance(error, AssertionError):
            return True
        code = trace.tb_frame.f_code
        return code.co_filename in hidden and dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"

    def watched(test: Callable[[], object], num_at_import: int) -> Callable[[], None]:
        def run() -> None:
            del calls[num_at_import:]
            sys.setprofile(see)
            try:
                test()
            except BaseException as error:
                sys.setprofile(None)
                record(COMPARED, is_own(error))
                raise
            finally:
                sys.setprofile(None)
                record(CALLS, calls)

        return run

    def wrap(names: dict[str, object]) -> None:
        sys.setprofile(None)
        for name, found in list(names.items()):
            if name.startswith("test") and callable(found):
                names[name] = watched(found, len(calls))

    sys.setprofile(see)
    return wrap
