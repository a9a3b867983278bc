"""JSON bodies: which are refused, and that none blocks the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import UserError
from etude.kit.tasks import off_loop
from etude.serving import json_bodies
from etude.serving.json_bodies import MOST_LEVELS, check_values, parse_json

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_VALUES)
def test_what_is_json_is_read_as_python_reads_it(value: object) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "body", [b"", b"{", b"NaN", b"[Infinity]", b"[1e400]", b"\xff", b"[" * 10**6, b"{}{}", b"9" * 10**5]
)
def test_what_is_no_json_is_the_clients_mistake(body: bytes) -> None:
    with pytest.raises(UserError):
        parse_json(body)


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 900, 10**5])
def test_depth_is_bounded(levels: int) -> None:
    with pytest.raises(UserError, match="deep"):
        parse_json(b"[" * levels + b"]" * levels)
    assert parse_json(b"[" * (MOST_LEVELS - 1) + b"]" * (MOST_LEVELS - 1))


def test_values_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "MOST_VALUES", 4)
    for allowed in (b'["[,,,,,,]", "\\",,,,,\\\\"]', b'{"a,b": "c,d", "e{": [1, 2]}'):
        check_values(allowed)
    for refused in (b"[1,2,3,4,5]", b'["a","b",[],{},[]]', b'["\\\\",1,2,3,4,5]'):
        with pytest.raises(UserError, match="too many"):
            check_values(refused)


def longest_pause_s(work: Callable[[], object], num_bytes: int) -> float:
    """How long the loop stands still while `work` runs, in processor time of this process."""

    async def run() -> float:
        task = asyncio.ensure_future(off_loop(num_bytes, work))
        longest_s = 0.0
        while not task.done():
            start_s = time.process_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.process_time() - start_s)
            await asyncio.sleep(0.005)
        with pytest.raises(UserError):
            task.result()
        return longest_s

    return asyncio.run(run())


def test_millions_of_values_do_not_hold_the_loop_up() -> None:
    body = b"[" + b"[]," * (4 << 20) + b"[]]"
    assert longest_pause_s(lambda: parse_json(body), len(body)) < 1.0
