"""What a pattern requires is never more than what its matches hold."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.index.grep.grams import gram_hashes, rank_pairs, text_keys
from etude.agent.index.grep.literals import Texts, plan
from etude.agent.index.grep.query import GrepQuery


def required(pattern: str, **flags: bool) -> set[Texts]:
    return set(plan(GrepQuery(pattern, **flags)).required)  # type: ignore[arg-type]


def texts(*alternatives: str) -> set[Texts]:
    """For each: its words, any of which may occur."""
    return {frozenset(word.encode() for word in words.split(" ")) for words in alternatives}


ANYTHING: set[Texts] = set()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("foo", texts("foo")),
        ("Foo", texts("foo")),
        ("foo.*bar", texts("foo", "bar")),
        ("(foo|bar)baz", texts("barbaz foobaz")),
        ("x[ab]yz", texts("xayz xbyz")),
        ("a+bcdef", texts("bcdef")),
        ("foo(x{2}y)+z", texts("fooxxy")),
        (r"\bfoo\w+bar_baz$", texts("foo", "bar_baz")),
        ("x(foo.*|bar)baz", texts("xfoo xbar", "baz")),
        ("(one.*three|(two|six)teen)x", texts("one twoteen sixteen", "three twoteen sixteen")),
        (r"\w" * 20 + "foo", texts("foo")),
        ("fo?obar", texts("fobar foobar")),
        (r"self\.assert(Equal|[A-Z])\(", texts("self.assert")),
        ("(?i)hello", texts("hello")),
        ("(?i:HE)llo", texts("hello")),
        ("(?P<name>foo)(?:bar)", texts("foobar")),
        (r"\x66\u006fo", texts("foo")),
        (r"[\]f]oobar", texts("]oobar foobar")),
        ("[[:alpha:]]foo", ANYTHING),
        ("[a[b]c]foo", ANYTHING),
        ("[]a[b]]foo", ANYTHING),
        (r"[\\[b]]foo", ANYTHING),
        ("[a||b]foo", ANYTHING),
        ("[a--b]foo", ANYTHING),
        (r"\<foo", ANYTHING),
        (r"\<", ANYTHING),
        (r"\b{start}foo", ANYTHING),
        (r"\\<foo", texts("\\<foo")),
        ("a{ 2 }foo", ANYTHING),
        ("(?:foo){2}+bar", ANYTHING),
        ("foo*+bar", ANYTHING),
        (r"\p{L}foo", ANYTHING),
        (r"\u{6f}foo", ANYTHING),
        ("--foo", texts("--foo")),
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
def test_requirements_of_a_pattern(pattern: str, expected: set[Texts]) -> None:
    assert required(pattern) == expected


def test_a_fixed_string_has_no_syntax() -> None:
    assert required("a.b(c", fixed=True) == texts("a.b(c")


def test_ignoring_case_says_nothing_of_letters_outside_ascii() -> None:
    assert required("größe_x", ignore_case=True) == texts("e_x")
    assert required("übü", ignore_case=True) == ANYTHING
    assert required("größe_x") == texts("größe_x")


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


@given(pattern=PATTERNS, ignore_case=st.booleans(), data=st.data())
def test_every_match_holds_what_its_pattern_requires(
    pattern: str, ignore_case: bool, data: st.DataObject
) -> None:
    regex = re.compile(pattern, re.IGNORECASE | re.ASCII if ignore_case else re.ASCII)
    text = data.draw(st.from_regex(regex, alphabet=st.characters(max_codepoint=127, exclude_characters="\n")))
    found = text.encode().lower()
    for wanted in required(pattern, ignore_case=ignore_case):
        assert any(one in found for one in wanted), text


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
