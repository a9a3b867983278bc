import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.html_text import html_to_text

PAGE = """<!DOCTYPE html><html><head><title>A &amp; B</title><style>p { }</style></head><body>
<h1>Head</h1><p>one
   two<br>three <b>bold</b></p><!-- no > comment --><ul><li>x<li>y</ul>
<pre>def f():
    return 1 &lt; 2
</pre><table><tr><th>a</th><th> b </th></tr><tr><td>1<td>2</table>
<script>if (a < b) document.write("<p>no</p>")</script><svg><text>no</text></svg>5 < 6<a href="x>y">link</a>
</body></html>"""


def test_a_page_reads_as_a_reader_sees_it():
    title, text = html_to_text(PAGE)
    assert title == "A & B"
    assert [line for line in text.split("\n") if line] == [
        "# Head",
        "one two",
        "three bold",
        "- x",
        "- y",
        "def f():",
        "    return 1 < 2",
        "a\tb",
        "1\t2",
        "5 < 6link",
    ]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("", ""),
        ("plain", "plain"),
        ("a<!-- no end", "a"),
        ("a<p class='no end", "a"),
        ("a<b", "a"),
        ("a <3 b", "a <3 b"),
        ("<p title='a>b'>c", "c"),
        ("<p title='>c", "c"),
        ("<![<![<![>x", "x"),
        ("<svg/>after", "after"),
        ("<svg><svg></svg>in</svg>out", "out"),
        ("</pre>x", "x"),
        ("&#" + "9" * 5000 + ";", "&#" + "9" * 5000 + ";"),
        ("<script>never closed", ""),
    ],
)
def test_broken_pages_are_read_as_far_as_they_go(page, text):
    assert html_to_text(page)[1] == text


@given(st.text("<>/!-ab =\"'&;#9\n\0pretiscl", max_size=60) | st.text(max_size=60))
def test_any_text_can_be_read(page):
    title, text = html_to_text(page)
    assert "\0" not in text and isinstance(title, str)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trap", ["<!", "<!--", "<a b='", "<a '>", "<a '\"'>", "</", "<pre>", "<a ", "<title>", "&a"]
)
def test_reading_takes_linear_time(trap):
    def seconds(characters):
        page = trap * (characters // len(trap))
        start_s = time.process_time()
        html_to_text(page)
        return time.process_time() - start_s

    short = min(seconds(40_000) for _ in range(3))
    assert seconds(320_000) < 40 * short + 0.1
