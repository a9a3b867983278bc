import time
import unicodedata

import pytest
from file_scenes import call, output, run
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.tools import Registry
from etude.agent.tools.matching import find_places, nearest
from etude.agent.tools.search_replace import SearchReplace
from etude.records import ToolErrorClass

CODE = """class A:
    def f(self):
        if x:
            return 1
        return 2

    def g(self):
        pass
"""


def replaced(content, old, new, **arguments):
    """(output, content after)."""
    edit = call("search_replace", path="a", old=old, new=new, **arguments)
    (result,), files = run(edit, files={"a": content})
    after = files["a"]
    return result.output, after if isinstance(content, bytes) else after.decode()


def test_an_exact_text_is_replaced_within_lines():
    assert replaced("x = f(1)  # f\n", "f(1)", "g(2)") == ("ok", "x = g(2)  # f\n")
    assert replaced("a\nb\nc\n", "a\nb\n", "") == ("ok", "c\n")


def test_blanks_at_line_ends_are_looked_past():
    assert replaced("a  \n\tb\t\nc\n", "a\n\tb\n", "x\n") == (
        "ok, matched apart from trailing blanks",
        "x\nc\n",
    )
    assert replaced("a\nb\n", "a   \nb", "x") == ("ok, matched apart from trailing blanks", "x\n")


def test_the_new_text_is_indented_as_the_file_is():
    shown, after = replaced(CODE, "if x:\n    return 1\n", "if y:\n    return 3\nelse:\n    pass\n")
    assert shown == "ok, matched apart from indentation"
    assert after == CODE.replace(
        "        if x:\n            return 1\n",
        "        if y:\n            return 3\n        else:\n            pass\n",
    )
    deeper = "                def g(self):\n                    pass"
    _, after = replaced(CODE, deeper, deeper.replace("pass", "return 4") + "\n\n            # end")
    assert after == CODE.replace("        pass\n", "        return 4\n\n# end\n")


def test_tabs_stay_tabs():
    _, after = replaced("\tif x:\n\t\ty()\n", "    if x:\n\t\ty()", "    if z:")
    assert after == "\tif z:\n"


@pytest.mark.parametrize(
    ("content", "old"),
    [
        ('print("it\'s")\n', "print(\u201cit\u2019s\u201d)"),
        ("a - b\n", "a \u2013 b"),
        ("a\u00a0b\n", "a b"),
        ("s = \u2018x\u2019\n", "'x'"),
        ("s = '\ufb01x'\n", "'fix'"),
        ("\u200bx = 1\n", "x = 1"),
    ],
)
def test_look_alikes_are_looked_past(content, old):
    shown, after = replaced(content, old, "NEW")
    assert shown in ("ok, matched apart from look-alikes", "ok")
    assert "NEW" in str(after)


def test_a_line_that_only_looks_alike_as_a_whole_is_found():
    content = "    caf\u00e9 = \u201cx\u201d\n"
    old = unicodedata.normalize("NFD", "caf\u00e9") + ' = "x"'
    assert replaced(content, old, "y") == ("ok, matched apart from look-alikes", "    y\n")


def test_a_stage_with_several_places_is_ambiguous_and_names_their_lines():
    assert replaced("f()\nx\nf()\n", "f()", "g()")[0] == "error: old found more than once: lines 1, 3"
    assert (
        replaced("  f()\nx\n    f()\n", "f()\n", "g()\n")[0] == "error: old found more than once: lines 1, 3"
    )
    assert replaced(" f() \nx\nf()  \n", "f()\nx\nf()", "") == ("ok, matched apart from indentation", "\n")
    assert replaced("  f()  \nx\n    f()\t\n", " f() \t\n", "g()\n")[0].endswith("more than once: lines 1, 3")
    many = replaced("x\n" * 50, "x", "y")
    assert many == ("error: old found more than once: lines 1, 2, 3, 4, 5, 6, 7, 8, ...", "x\n" * 50)
    assert replaced("aa", "a", "b")[0] == "error: old found more than once: line 1"


def test_an_earlier_stage_decides():
    assert replaced("f()\n    f() \n", "    f()", "g()") == ("ok", "f()\ng() \n")
    assert replaced("x\nf() \n    x\n    f()\n", "x\nf()\n", "y\n") == (
        "ok, matched apart from trailing blanks", "y\n    x\n    f()\n"
    )  # fmt: skip


def test_no_match_shows_the_lines_most_like_it():
    shown, after = replaced(CODE, "        if x is None:\n            return 1\n", "")
    assert shown == "error: old not found; most like it:\n3\t        if x:\n4\t            return 1"
    assert after == CODE
    assert replaced("a\nb\n", "something else entirely", "")[0] == "error: old not found"
    assert replaced("", "x", "")[0] == "error: old not found"
    assert replaced("x\n", "\n\n \n", "")[0] == "error: old not found"


def test_all_places_are_replaced_on_demand():
    assert replaced("aaa b\na", "a", "c", replace_all="true") == ("ok, 4 places", "ccc b\nc")
    assert replaced("x y\n", "x", "z", replace_all="true") == ("ok", "z y\n")
    assert replaced("x \ny\n", "x\ny", "z", replace_all="true")[0] == "ok, matched apart from trailing blanks"
    assert replaced("a" * 500, "a", "b", replace_all="true") == ("ok, 500 places", "b" * 500)
    assert replaced("a", "a", "b", replace_all="maybe")[0] == "error: replace_all must be true or false"


def test_a_character_that_looks_like_several_is_found_whole_or_not_at_all():
    assert replaced("wait\u2026\n", "wait...", "go") == ("ok, matched apart from look-alikes", "go\n")
    for part in ("wait..", "t.", "..\n"):
        shown, after = replaced("wait\u2026\n", part, "go")
        assert shown.startswith("error: old not found") and after == "wait\u2026\n"


def test_a_line_of_other_blanks_is_indented_as_the_file_is():
    assert replaced("a\n\t\u00a0\nb\n", "  \u00a0\n", "  x\n") == (
        "ok, matched apart from indentation",
        "a\n\tx\nb\n",
    )


def test_what_would_grow_too_large_is_refused_before_it_is_made():
    content = "a" * (1 << 20)
    assert replaced(content, "a", content, replace_all="true") == ("error: file too large", content)


def test_crlf_files_keep_their_line_ends():
    assert replaced(b"a\r\nb\r\nc\r\n", "a\nb", "x\ny\nz") == ("ok", b"x\r\ny\r\nz\r\nc\r\n")
    assert replaced(b"a\r\nb \r\n", "a\nb\n", "x\n") == ("ok, matched apart from trailing blanks", b"x\r\n")
    assert replaced(b"a \r\nb\r\nc\r\n", "a\nb", "x\ny") == (
        "ok, matched apart from trailing blanks", b"x\r\ny\r\nc\r\n"
    )  # fmt: skip
    assert replaced(b"a\r\na\r\n", "a\n", "b\n", replace_all="true") == ("ok, 2 places", b"b\r\nb\r\n")
    assert replaced(b"a\r\nb\n", "b\n", "x\ny\n") == ("ok", b"a\r\nx\ny\n")


def test_bytes_that_are_not_text_survive():
    assert replaced(b"\xff x  \n\x80\xfe\n", "\n", "", replace_all="true") == (
        "ok, 2 places",
        b"\xff x  \x80\xfe",
    )
    assert replaced(b"\xff\n  y\n\xfe", "y\n", "z\n") == ("ok", b"\xff\n  z\n\xfe")
    assert replaced(b"\xff \xe2\x80\x9cq\xe2\x80\x9d\n", '"q"', "r")[1] == b"\xff r\n"


def test_strict_edits_take_the_text_exactly_as_it_is():
    strict = Registry([SearchReplace(strict=True)])
    edit = call("search_replace", path="a", old="x\ny", new="z")
    assert output(edit, files={"a": "x \ny\n"}, tools=strict).startswith(
        "error: old not found; most like it:\n1\tx"
    )
    terse = Registry([SearchReplace(strict=True, hints=False)])
    assert output(edit, files={"a": "x \ny\n"}, tools=terse) == "error: old not found"
    assert output(edit, files={"a": "x\ny\nx\ny"}, tools=terse) == "error: old found more than once"
    (result,), files = run(edit, files={"a": b"x\r\ny\r\n"}, tools=terse)
    assert (result.output, files["a"]) == ("ok", b"z\r\n")


def test_the_present_content_counts_not_the_one_that_was_read():
    read = call("read_file", path="a")
    other = call("write_file", path="a", text="x changed y\n")
    edit = call("search_replace", path="a", old="x changed", new="z")
    (_, _, result), files = run(read, other, edit, files={"a": "x\n"})
    assert (result.output, files["a"]) == ("ok", b"z y\n")


lines = st.lists(
    st.sampled_from(["a", " a", "a ", "b", "  b", "", "\u201cq\u201d", '"q"', "c\u00a0d", "\u00e9"]),
    max_size=8,
)


@given(lines, lines, st.text(alphabet="xy\n ", max_size=6))
@settings(deadline=None)
def test_whatever_is_found_stands_where_it_is_said_to_stand(present, wanted, new):
    content, old = "\n".join(present), "\n".join(wanted)
    if not old:
        return
    found = find_places(content, old, new)
    exact = [at for at in range(len(content)) if content.startswith(old, at)]
    if exact:
        assert found.stage == "exact" and [place.start for place in found.places] == exact
    for place in found.places:
        assert 0 <= place.start <= place.end <= len(content)
        there = content[place.start : place.end]
        assert unicodedata.normalize("NFKC", there).split() or not old.split()
        assert len(there.strip().split("\n")) <= len(wanted)
    assert find_places(content, old, new, strict=True).stage == "exact"


def test_large_files_take_little_time():
    content = "".join(f"def function_{n}(argument):\n    return argument + {n}\n" for n in range(20_000))
    start = time.process_time()
    assert len(content) > 1_000_000
    assert nearest(content, "def function_777(argument, other):\n    return argument + 778\n")
    assert time.process_time() - start < 3
    start = time.process_time()
    find_places("x \n" * 300_000, "x\n" * 100_000 + "y\n", "")
    find_places("a" * (1 << 20), "a" * (1 << 19), "")
    nearest("a" * (1 << 20), "b" * (1 << 20))
    assert time.process_time() - start < 6


def test_a_missing_match_is_of_the_environment():
    (result,), _ = run(call("search_replace", path="a", old="x", new="y"), files={"a": "z"})
    assert result.error == ToolErrorClass.UNEXPECTED_ENVIRONMENT
