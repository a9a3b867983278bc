"""Cutting files into chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.index.semantic.chunks import MAX_LINES, Chunk, chunk_file
from etude.agent.index.semantic.grammar import language_of

LINES = st.sampled_from(
    [
        *(
            "def f(a):",
            "    return a",
            "class C:",
            "    x = 1",
            "    def m(self):",
            "        pass",
            "@wrap",
            "# words",
        ),
        *(
            "",
            "   ",
            "if a:",
            "'''open",
            "'''",
            "}",
            "function g() {",
            "  return 1;",
            "}",
            "é = 2",
            "a\r",
            "(",
            "\\",
        ),
    ]
)


def needs(path: str) -> None:
    if language_of(path) is None:
        pytest.skip(f"the grammar for {path} is not installed")


def outline(path: str, source: str) -> list[tuple[int, int, str, str]]:
    return [(c.first_line, c.last_line, c.kind, c.symbol) for c in chunk_file(path, source.encode())]


def check_cover(chunks: list[Chunk], content: bytes) -> None:
    """In order, without overlap, every line that says something in one of them, texts as in the file."""
    lines = [line.removesuffix(b"\r").decode("utf-8", "replace") for line in content.split(b"\n")]
    covered: set[int] = set()
    last = 0
    for chunk in chunks:
        assert last < chunk.first_line <= chunk.last_line <= len(lines)
        assert chunk.text == "\n".join(lines[chunk.first_line - 1 : chunk.last_line])
        covered.update(range(chunk.first_line, chunk.last_line + 1))
        last = chunk.last_line
    speaking = {number for number, line in enumerate(lines, 1) if any(map(str.isalnum, line))}
    assert speaking <= covered


@given(
    st.lists(LINES, max_size=200).map("\n".join), st.sampled_from(["a.py", "a.js", "a.cpp", "a.rs", "a.txt"])
)
def test_chunks_cover_every_speaking_line_once(source: str, path: str) -> None:
    content = source.encode()
    check_cover(chunk_file(path, content), content)


@given(st.binary(max_size=300), st.sampled_from(["a.py", "a.go", "a"]))
def test_any_bytes_are_cut(content: bytes, path: str) -> None:
    chunks = chunk_file(path, content)
    if b"\0" in content:
        assert chunks == []
    else:
        check_cover(chunks, content)


def test_functions_methods_and_class_heads_are_chunks() -> None:
    needs("a.py")
    source = '''import os

# Says why.
@wrap
def top(a):
    """Doc."""
    return a

class Box(Base):
    """Holds."""
    size = 1

    def open(self):
        def inner():
            return 2
        return inner

    colour = "red"
'''
    assert outline("a.py", source) == [
        (1, 1, "rest", ""),
        (3, 7, "function", "top"),
        (9, 11, "class", "Box"),
        (13, 16, "function", "Box.open"),
        (18, 18, "rest", "Box"),
    ]


def test_a_comment_after_code_or_a_blank_line_does_not_lead_the_next_function() -> None:
    needs("a.py")
    source = "x = 1  # of x\ndef f():\n    return 1\n# far\n\ndef g():\n    return 2\n"
    assert outline("a.py", source) == [
        (1, 1, "rest", ""),
        (2, 3, "function", "f"),
        (4, 4, "rest", ""),
        (6, 7, "function", "g"),
    ]


def test_a_long_function_is_cut_into_pieces_of_one_name() -> None:
    needs("a.py")
    body = "\n".join(f"    if a == {i}:\n        b = {i}" for i in range(70))
    chunks = chunk_file("a.py", f"def long(a):\n{body}\n".encode())
    assert len(chunks) > 1
    assert {chunk.symbol for chunk in chunks} == {"long"}
    assert max(chunk.last_line - chunk.first_line + 1 for chunk in chunks) <= MAX_LINES + 4
    assert all(chunk.text.split("\n")[0].startswith("    if") for chunk in chunks[1:])


@pytest.mark.parametrize(
    ("path", "source", "symbols"),
    [
        (
            "a.ts",
            "export const add = (a: number) => {\n  return a;\n};\nclass B {\n  m() {}\n}\n",
            ["add", "B", "B.m"],
        ),
        ("a.js", "function f() {\n}\n/** doc */\nfunction g() {}\n", ["f", "g"]),
        (
            "a.go",
            "package m\n\nfunc (t *T) Get() int {\n\treturn 1\n}\ntype T struct {\n}\n",
            ["", "T.Get", "T"],
        ),
        (
            "a.rs",
            "impl Show for S {\n    fn show(&self) {}\n}\n/// doc\nfn main() {}\n",
            ["S", "S.show", "main"],
        ),
        ("A.java", "class A {\n  int x;\n  int get() { return x; }\n}\n", ["A", "A.get"]),
        ("a.c", "static int *f(int a)\n{\n  return 0;\n}\n", ["f"]),
        ("a.cpp", "namespace n {\nint f() { return 1; }\n}\n", ["n", "n.f"]),
    ],
)
def test_other_languages_name_their_definitions(path: str, source: str, symbols: list[str]) -> None:
    needs(path)
    assert [symbol for _, _, _, symbol in outline(path, source)] == symbols


def test_a_file_without_a_grammar_is_cut_by_lines() -> None:
    text = "\n".join(f"word {i}" for i in range(150))
    chunks = chunk_file("notes.txt", text.encode())
    assert {chunk.kind for chunk in chunks} == {"lines"}
    assert len(chunks) == 3 or len(chunks) == 4


def test_classes_nested_without_end_are_cut() -> None:
    needs("a.py")
    source = "\n".join("    " * i + f"class C{i}:" for i in range(60)) + "\n" + "    " * 60 + "x = 1\n"
    check_cover(chunk_file("a.py", source.encode()), source.encode())
