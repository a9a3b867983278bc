"""What a pattern requires is never more than what its matches hold."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.index.grep.grams import gram_hashes, rank_pairs, text_keys
from etude.agent.index.grep.literals import ANYTHING, And, Literal, Or, Required, plan
from etude.agent.index.grep.query import GrepQuery


def required(pattern: str, **flags: bool) -> Required:
    return plan(GrepQuery(pattern, **flags)).required  # type: ignore[arg-type]


def literals(*texts: str) -> tuple[Literal, ...]:
    return tuple(Literal(text.encode()) for text in texts)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("foo", Literal(b"foo")),
        ("Foo", Literal(b"foo")),
        ("foo.*bar", And(literals("foo", "bar"))),
        ("(foo|bar)baz", Or(literals("barbaz", "foobaz"))),
        ("x[ab]yz", Or(literals("xayz", "xbyz"))),
        ("a+bcdef", Literal(b"abcdef")),
        ("x{2,3}yz_foo", Literal(b"xxyz_foo")),
        (r"\bfoo\w+bar_baz$", And(literals("foo", "bar_baz"))),
        ("fo?obar", Or(literals("fobar", "foobar"))),
        (r"self\.assert(Equal|[A-Z])\(", Literal(b"self.assert")),
        ("(?i)hello", Literal(b"hello")),
        ("(?i:HE)llo", Literal(b"hello")),
        ("(?P<name>foo)(?:bar)", Literal(b"foobar")),
        (r"\x66\u006fo", Literal(b"foo")),
        (r"[\]f]oobar", Or(literals("]oobar", "foobar"))),
        ("[[:alpha:]]foo", ANYTHING),
        ("[a[b]c]foo", ANYTHING),
        ("[]a[b]]foo", ANYTHING),
        (r"[\\[b]]foo", ANYTHING),
        ("[a||b]foo", ANYTHING),
        ("[a--b]foo", ANYTHING),
        (r"\<foo", ANYTHING),
        (r"\<", ANYTHING),
        (r"\b{start}foo", ANYTHING),
        (r"\\<foo", Literal(b"\\<foo")),
        ("a{ 2 }foo", ANYTHING),
        ("(?:foo){2}+bar", ANYTHING),
        ("foo*+bar", ANYTHING),
        (r"\p{L}foo", ANYTHING),
        (r"\u{6f}foo", ANYTHING),
        ("--foo", Literal(b"--foo")),
        ("(?<=a)foo", ANYTHING),
        (r"foo\n", ANYTHING),
        ("foo|", ANYTHING),
        ("(abc|de)", ANYTHING),
        (r"\w+", ANYTHING),
        ("", ANYTHING),
        ("ab", ANYTHING),
        ("(?x) f o o", ANYTHING),
        ("[a-z&&[^b]]foo", ANYTHING),
        ("(?-u)foo", ANYTHING),
        ("foo(", ANYTHING),
    ],
)
def test_requirements_of_a_pattern(pattern: str, expected: Required) -> None:
    found = required(pattern)
    if isinstance(expected, Or):
        assert isinstance(found, Or)
        assert set(found.parts) == set(expected.parts)
    else:
        assert found == expected


def test_a_fixed_string_has_no_syntax() -> None:
    assert required("a.b(c", fixed=True) == Literal(b"a.b(c")


def test_ignoring_case_says_nothing_of_letters_outside_ascii() -> None:
    assert required("größe_x", ignore_case=True) == Literal(b"e_x")
    assert required("übü", ignore_case=True) == ANYTHING
    assert required("größe_x") == Literal("größe_x".encode())


@pytest.mark.parametrize(
    ("pattern", "odd"), [("task", True), ("table", False), ("[k]table", True), ("Top", False)]
)
def test_letters_with_odd_partners_are_noted(pattern: str, odd: bool) -> None:
    assert plan(GrepQuery(pattern, ignore_case=True)).odd_folds == odd
    assert not plan(GrepQuery(pattern)).odd_folds


@pytest.mark.parametrize(
    "pattern", ["(" * 500 + "a" + ")" * 500, "(a|b)" * 700, "a{1000}{1000}", "[" * 1000, "abc." * 900]
)
def test_monstrous_patterns_are_analysed_quickly(pattern: str) -> None:
    plan(GrepQuery(pattern))


ATOMS = st.sampled_from(
    ["foo", "Ba", "_", ".", r"\w", "[ab]", "[^f]", "[a-d]", "x+", "o*", "o?", r"\.", "^", "$", r"\b", "q{2}"]
)
PATTERNS = st.recursive(
    st.lists(ATOMS, min_size=1, max_size=4).map("".join),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "+?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
        st.tuples(inner, inner).map("".join),
    ),
    max_leaves=6,
)


def holds(wanted: Required, text: bytes) -> bool:
    match wanted:
        case Literal(literal):
            return literal in text
        case And(parts):
            return all(holds(part, text) for part in parts)
        case Or(parts):
            return any(holds(part, text) for part in parts)


@given(pattern=PATTERNS, ignore_case=st.booleans(), data=st.data())
def test_every_match_holds_what_its_pattern_requires(
    pattern: str, ignore_case: bool, data: st.DataObject
) -> None:
    regex = re.compile(pattern, re.IGNORECASE | re.ASCII if ignore_case else re.ASCII)
    text = data.draw(st.from_regex(regex, alphabet=st.characters(max_codepoint=127, exclude_characters="\n")))
    assert holds(required(pattern, ignore_case=ignore_case), text.encode().lower()), text


@given(st.text(alphabet="ab()[]{}|*+?\\^$.-&~,123dwPx<>:i=!#", max_size=25))
def test_any_pattern_is_planned_without_a_warning(pattern: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        required(pattern)


@given(
    st.binary(min_size=3, max_size=40),
    st.binary(max_size=60),
    st.binary(max_size=60),
    st.binary(max_size=300),
)
def test_grams_of_a_literal_are_grams_of_every_text_around_it(
    literal: bytes, before: bytes, behind: bytes, sample: bytes
) -> None:
    ranks = rank_pairs([sample])
    keys = set(text_keys([b"other", before + literal + behind], [3, 7], ranks, 32).tolist())
    assert {int(gram) << 16 | 7 for gram in gram_hashes(literal.lower(), ranks)} <= keys
