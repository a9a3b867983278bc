"""Source code is parsed by one thread at a time."""

from __future__ import annotations

import ast
import threading
import time

import pytest

from etude.kit import syntax


def test_two_threads_never_parse_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]

    def parse(text: str, path: str) -> ast.Module:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.01)
        inside[0] -= 1
        return ast.Module([], [])

    monkeypatch.setattr(syntax.ast, "parse", parse)
    threads = [threading.Thread(target=syntax.parse_python, args=("x = 1",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_what_is_no_python_is_an_error_of_pythons() -> None:
    with pytest.raises(SyntaxError):
        syntax.parse_python("x =", "file.py")
    assert isinstance(syntax.parse_python("x = 1").body[0], ast.Assign)
