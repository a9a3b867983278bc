import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.tools.patterns import common_pattern
from etude.errors import ToolArgumentError
from etude.sandbox.inside.filesystem import matching_lines

RIPGREP = shutil.which("rg", path=f"{Path(sys.executable).parent}") or shutil.which("rg")
LINES = [
    "", "a", "ab", "abc", "aab", "a-b", "a.b", "a{2}", "{", "}", "x{,3}", "[a]", "]", "foo = {", "a b",
    "\ta", "a\t", "A", "AB", "a&&b", "a--b", "~~", "0", "42", "3.14", "a_b", "a1", "é", "École", "日本",
    "a\\b", "a/b", "#x", "<a>", "-", "^", "$", "a$", "(a)", "a|b", "a+b", "aa*", "?", "def f(x):",
    "import re", "\x0b", "a\rb", "Z[:alpha:]", "\u2028",
]  # fmt: skip


def python_lines(pattern):
    data = "\n".join(LINES).encode()
    return [number for number, _ in matching_lines(re.compile(pattern), data)]


def ripgrep_lines(pattern, folder):
    file = folder / "lines.txt"
    file.write_bytes("\n".join(LINES).encode())
    command = [RIPGREP, "--no-config", "--line-number", "--no-filename", "--regexp", pattern, "--", str(file)]
    done = subprocess.run(command, capture_output=True, timeout=30)
    assert done.returncode in (0, 1), (pattern, done.stderr.decode())
    return [int(line.split(b":")[0]) for line in done.stdout.split(b"\n")[:-1]]


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("def tally", "def tally"),
        ("foo = {", r"foo = \{"),
        ("a{2}{", r"a{2}\{"),
        ("{,3}", r"\{,3\}"),
        ("a{2,}?", "a{2,}?"),
        ("(?<name>a)", "(?P<name>a)"),
        (r"a\/b\-c", r"a/b\-c"),
        (r"\x{41}\x42\u0043\U00000044", "ABCD"),
        ("[[:alpha:]_]+", "[a-zA-Z_]+"),
        ("[a&&b~~-]", r"[a\&\&b\~\~\-]"),
        ("[]a]", r"[\]a]"),
        ("[^]a-]", r"[^\]a\-]"),
        ("(?i)a(?-i:b)(?s:c)", "(?i)a(?-i:b)(?s:c)"),
        (r"\bfoo\b", r"\bfoo\b"),
    ],
)
def test_patterns_are_written_as_both_engines_read_them(pattern, written):
    assert common_pattern(pattern) == written


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "pattern is empty"),
        ("a(?=b)", "look-ahead is not supported"),
        ("a(?!b)", "look-ahead is not supported"),
        ("(?<=a)b", "look-behind is not supported"),
        ("(?<!a)b", "look-behind is not supported"),
        ("(?>a)b", "an atomic group is not supported"),
        ("(?#x)b", "a comment is not supported"),
        ("(a)(?(1)b|c)", "a condition is not supported"),
        (r"(a)\1", "back-references are not supported"),
        ("(?P<n>a)(?P=n)", "a back-reference is not supported"),
        ("a*+", "possessive quantifiers are not supported"),
        ("a{2}+", "possessive quantifiers are not supported"),
        ("a**", "nothing to repeat before *"),
        ("*a", "nothing to repeat before *a"),
        ("^*", "nothing to repeat before *"),
        (r"\Aa", r"\A is not supported"),
        (r"a\z", r"\z is not supported"),
        (r"\pL", r"\p is not supported"),
        (r"\N{DASH}", r"\N is not supported"),
        (r"\<a", r"\< is not supported"),
        (r"\b{start}a", r"\b{...} is not supported"),
        (r"[\b]", r"\b is not supported"),
        (r"a\nb", "a pattern matches within one line: no line breaks"),
        ("a\nb", "a pattern matches within one line: no line breaks"),
        ("a\\", "the pattern ends with a backslash"),
        ("a(?i)b", "flags stand at the start of the pattern, or as (?i:...)"),
        ("(?x)a b", "(?x)"),
        (r"\x4", r"\x needs 2 hexadecimal digits"),
        (r"\x00", r"\x names no character of a line"),
        (r"\ud800", r"\u names no character of a line"),
        ("[a", "unclosed ["),
        (r"[a-\d]", "a range in [...] ends with a class"),
        ("[[:foo:]]", "[:foo:] is not supported"),
        ("a{2000}", "more than 1000 repetitions"),
        ("a" * 1001, "pattern too long"),
        ("(" * 60, "groups are nested too deeply"),
        ("a\0", "the pattern holds characters that are no text"),
        ("a\udc80", "the pattern holds characters that are no text"),
        ("(a", "bad regular expression"),
        ("a)", "bad regular expression"),
        ("[z-a]", "bad regular expression"),
    ],
)
def test_what_the_engines_read_differently_is_refused(pattern, message):
    with pytest.raises(ToolArgumentError) as refused:
        common_pattern(pattern)
    assert refused.value.message.startswith(message) and len(refused.value.message) < 160


atoms = st.sampled_from(
    [
        "a", "b", "A", "1", "_", " ", ".", "-", "/", "#", "&", "~", "é", "日", "{", "}", "]", "^", "$", "|",
        r"\d", r"\w", r"\s", r"\S", r"\W", r"\b", r"\.", r"\{", r"\[", r"\-", r"\t", r"\x41", r"\u00e9",
        "[ab]", "[^ab]", "[a-c]", "[]a]", "[-a]", "[a-]", r"[\w-]", "[a&&b]", "[[:alpha:]]", "[~~-]",
        "(a|b)", "(?:ab)", "(?P<n>a)", "(?i:a)", "*", "+", "?", "{2}", "{1,}", "{,2}", "*?", "(", ")", "[",
        "\\",
    ]
)  # fmt: skip


@given(st.lists(atoms, min_size=1, max_size=6).map("".join))
def test_accepted_patterns_match_alike_in_python_and_ripgrep(tmp_path_factory, pattern):
    if RIPGREP is None:
        pytest.skip("ripgrep is not installed")
    try:
        written = common_pattern(pattern)
    except ToolArgumentError:
        return
    assert python_lines(written) == ripgrep_lines(written, tmp_path_factory.getbasetemp())


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_text_is_accepted_or_refused(pattern):
    try:
        written = common_pattern(pattern)
    except ToolArgumentError:
        return
    assert common_pattern(written) == written or "[" in written
    re.compile(written)
