"""The router's file: what loads, and what is refused by which name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from etude.config import RouterConfig, load_section
from etude.config.routing import LendingWindowConfig
from etude.errors import ConfigError
from tests.config.test_loading import ROUTERS


@pytest.mark.parametrize("path", ROUTERS, ids=lambda path: path.name)
def test_every_shipped_router_loads(path: Path) -> None:
    config = load_section(RouterConfig, path)
    assert config.replicas and config.lending.windows


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text("")
    assert load_section(RouterConfig, path) == RouterConfig()


_WINDOW = '[[lending.windows]]\nlender = "a"\nborrower = "{}"\ncount = 1\nstart = "{}"\nend = "06:00"\n'
_LOAD = '[[lending.by_load]]\nlender = "a"\nborrower = "b"\nbusy_tokens = {}\nidle_tokens = 20\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replica = 1", "replica: unknown key.*did you mean replicas"),
        ("[[replicas]]\nurll = 'http://h:1'", r"replicas\.0\.urll|replicas\.0\.url"),
        ("[[replicas]]\nurl = 'http://h:1'\npol = 'x'", r"replicas\.0\.pol.*did you mean pool"),
        ("[[replicas]]\npool = 'x'", r"replicas\.0\.url.*required"),
        ("[limits]\nanswers_s = 4", r"limits\.answers_s.*did you mean answer_s"),
        ("port = 70000", "port.*65535"),
        ("[arms]\n'run@7' = -1", r"arms\.run@7.*greater than or equal to 0"),
        ("[arms]\n'run@7' = nan", r"arms\.run@7.*finite"),
        (_WINDOW.format("b", "24:00"), r"lending\.windows\.0.*start: must be HH:MM"),
        (_WINDOW.format("b", "6:00"), "start: must be HH:MM"),
        (_WINDOW.format("b", "06:00"), "end: must be another time than start=06:00"),
        (_WINDOW.format("a", "22:00"), "another pool"),
        (_LOAD.format(10), "idle_tokens: must be less than busy_tokens"),
        (_WINDOW.format("b", "22:00") + _LOAD.format(30), "not both"),
        ("port = ", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "router.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_section(RouterConfig, path)


@given(st.times(), st.times())
def test_times_of_the_day_are_seconds(start: object, end: object) -> None:
    texts = [format(one, "%H:%M") for one in (start, end)]
    assume(texts[0] != texts[1])
    window = LendingWindowConfig(lender="a", borrower="b", count=1, start=texts[0], end=texts[1])
    for text, seconds in zip(texts, (window.start_s, window.end_s), strict=True):
        assert seconds == 60 * (60 * int(text[:2]) + int(text[3:]))
