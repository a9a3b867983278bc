import difflib
import time
from dataclasses import replace

import pytest
from file_scenes import call, output, run
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.facts import SessionFacts
from etude.agent.tools.hunks import apply_hunks
from etude.agent.tools.patches import parse_patch
from etude.agent.tools.text_file import line_end
from etude.errors import ToolArgumentError
from etude.records import ToolCall, ToolErrorClass, ToolResult

SOURCE = "".join(f"line {number}\n" for number in range(1, 31))


def diff(before, after, context=3, old="a/f.txt", new="b/f.txt"):
    """What `diff -u` writes, by difflib, which leaves the marker of a missing newline to its caller."""
    lines = difflib.unified_diff(split(before), split(after), old, new, n=context)
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )


def split(text):
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def applied(before, patch):
    (file,) = parse_patch(patch)
    return apply_hunks(before, file.hunks, "f.txt")[0]


def patched(patch, **files):
    """(output, files) of the tool over files named without their endings."""
    (result,), after = run(
        call("apply_patch", patch=patch), files={f"{name}.txt": text for name, text in files.items()}
    )
    return result, {name.removesuffix(".txt"): data.decode() for name, data in after.items()}


texts = st.lists(
    st.sampled_from(
        ["", "a", "b", " c", "--- x", "+++ y", "@@ -1 +1 @@", "\\ z", "- d", "diff --git e f", "\t", "ä\x0c"]
    ),
    max_size=14,
).map("\n".join)
endings = st.sampled_from(["", "\n"])


@given(texts, endings, texts, endings, st.integers(1, 3))
def test_a_diff_of_any_two_texts_leads_from_one_to_the_other(first, first_end, second, second_end, context):
    before, after = first + first_end, second + second_end
    patch = diff(before, after, context)
    if patch:
        assert applied(before, patch) == after


@given(texts, texts, st.integers(1, 3))
def test_a_diff_of_crlf_texts_applies_with_and_without_its_carriage_returns(first, second, context):
    before, after = (text.replace("\n", "\r\n") + "\r\n" for text in (first, second))
    patch = diff(before, after, context)
    if patch and line_end(before) == line_end(after) == "\r\n":
        assert applied(before, patch) == after
        assert applied(before, patch.replace("\r\n", "\n")) == after


def test_a_hunk_that_only_adds_to_a_crlf_file_may_name_its_carriage_returns():
    patch = "--- a/f\n+++ b/f\n@@ -1,0 +2 @@\n+x"
    for end in ("\n", "\r\n"):
        assert applied("a\r\nb\r\n", patch + end) == "a\r\nx\r\nb\r\n"


@given(st.lists(st.integers(0, 29), min_size=1, max_size=5, unique=True), st.integers(-9, 9), st.data())
def test_wrong_line_numbers_and_counts_do_no_harm_where_lines_are_unique(changed, shift, data):
    after = "".join(f"new {n}\n" if n in changed else line for n, line in enumerate(split(SOURCE)))
    lines = diff(SOURCE, after).split("\n")
    for place, line in enumerate(lines):
        if line.startswith("@@"):
            start = max(int(line.split()[1].split(",")[0][1:]) + shift, 1)
            count = data.draw(st.integers(0, 40))
            lines[place] = data.draw(
                st.sampled_from([f"@@ -{start},{count} +{start},7 @@ def f", "@@ @@", "@@ def f()"])
            )
    assert applied(SOURCE, "\n".join(lines)) == after


@given(st.text(alphabet='-+@ \\ab/1,\n\r\t"', max_size=120))
def test_any_text_is_a_patch_or_refused(text):
    for patch in (text, "--- a/x\n+++ b/x\n" + text, "diff --git a/x b/x\n" + text):
        try:
            for file in parse_patch(patch):
                apply_hunks(SOURCE, file.hunks, "x")
        except ToolArgumentError as error:
            assert len(error.message) < 300


GIT = """From 1234 Mon Sep 17 00:00:00 2001
Subject: [PATCH] several at once

---
 a.txt | 2 +-

diff --git a/a.txt b/a.txt
index 83db48f..bf269f4 100644
--- a/a.txt
+++ b/a.txt
@@ -1,3 +1,3 @@
 one
-two
+2
 three
diff --git a/b.txt b/sub/c.txt
similarity index 80%
rename from b.txt
rename to sub/c.txt
--- a/b.txt
+++ b/sub/c.txt
@@ -1 +1,2 @@
 x
+y
diff --git a/d.txt b/d.txt
deleted file mode 100644
index 83db48f..0000000
--- a/d.txt
+++ /dev/null
@@ -1 +0,0 @@
-gone
diff --git a/e.txt b/e.txt
new file mode 100644
index 0000000..bf269f4
--- /dev/null
+++ b/e.txt
@@ -0,0 +1,2 @@
+new
+file
diff --git a/empty.txt b/empty.txt
new file mode 100644
index 0000000..e69de29
diff --git a/g h.txt b/i.txt
similarity index 100%
rename from g h.txt
rename to i.txt
--\x20
2.30.2
"""


def test_a_git_patch_changes_makes_deletes_and_renames_files():
    before = {"a": "one\ntwo\nthree\n", "b": "x\n", "d": "gone\n", "g h": "same\n"}
    result, after = patched(GIT, **before)
    assert result.output == "ok, 8 files" and result.error is None
    assert after == {
        "a": "one\n2\nthree\n",
        "sub/c": "x\ny\n",
        "e": "new\nfile\n",
        "empty": "",
        "i": "same\n",
    }
    assert (result.facts["kind"], result.facts["path"], result.facts["line"]) == ("edit", "a.txt", 2)
    assert set(str(result.facts["paths"]).split("\n")) == {
        "a.txt", "b.txt", "sub/c.txt", "d.txt", "e.txt", "empty.txt", "g h.txt", "i.txt"
    }  # fmt: skip


def test_a_patch_counts_as_one_edit_of_what_was_read_if_all_its_files_were():
    call_of, result = (
        ToolCall("apply_patch"),
        ToolResult("ok", facts={"kind": "edit", "path": "a", "line": 3}),
    )
    result = replace(result, facts={**result.facts, "changed": True, "paths": "a\nb"})
    facts = SessionFacts(files_read=["a"])
    facts.on_turn([call_of], [result])
    assert (facts.num_edits, facts.edits_after_read) == (1, 0)
    facts.files_read.append("b")
    facts.on_turn([call_of], [result])
    assert (facts.num_edits, facts.edits_after_read) == (2, 1)


def test_plain_headers_with_times_and_no_prefixes_are_read():
    patch = "--- a.txt\t2024-01-01 00:00:00\n+++ a.txt\t2024-01-02\n@@ -1 +1 @@\n-x\n+y\n"
    result, after = patched(patch, a="x\n")
    assert (result.output, after) == ("ok", {"a": "y\n"})
    assert result.facts == {"kind": "edit", "path": "a.txt", "line": 1, "changed": True}


def test_quoted_paths_are_read():
    (file,) = parse_patch(
        '--- "a/\\303\\244 \\"b\\".txt"\n+++ "b/\\303\\244 \\"b\\".txt"\n@@ -1 +1 @@\n-x\n+y\n'
    )
    assert file.old_path == file.new_path == 'ä "b".txt'


def test_nothing_is_changed_if_one_file_does_not_fit():
    patch = (
        "--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-x\n+y\n"
        "--- a/b.txt\n+++ b/b.txt\n@@ -1 +1 @@\n-p\n+q\n@@ -3,2 +3,2 @@\n r\n-s\n+t\n"
    )
    result, after = patched(patch, a="x\n", b="p\nq\nr\nother\n")
    assert result.output == 'error: hunk 2 of b.txt does not fit at line 4: expected "s", found "other"'
    assert result.error == ToolErrorClass.UNEXPECTED_ENVIRONMENT
    assert after == {"a": "x\n", "b": "p\nq\nr\nother\n"}


HEAD = "--- a/a.txt\n+++ b/a.txt\n"


@pytest.mark.parametrize(
    ("patch", "message", "error"),
    [
        ("", "no file header (--- and +++ lines) in the patch", "invalid_arguments"),
        ("words", "no file header (--- and +++ lines) in the patch", "invalid_arguments"),
        ("@@ -1 +1 @@\n-x\n+y\n", "line 1: a hunk before any --- and +++ line", "invalid_arguments"),
        (HEAD, "line 1: no hunk for a.txt", "invalid_arguments"),
        (HEAD + "@@ -1 +1 @@\n x\n", "line 3: hunk 1 changes nothing", "invalid_arguments"),
        (HEAD + "@@@ -1 +1 @@\n x\n", "line 3: not a hunk header: @@@ -1 +1 @@", "invalid_arguments"),
        (
            "--- /dev/null\n+++ /dev/null\n",
            "line 1: a patch from /dev/null to /dev/null",
            "invalid_arguments",
        ),
        ("diff --git a/x b/x\nGIT binary patch\n", "binary patches are not supported", "invalid_arguments"),
        (
            "diff --git a/x b/y\ncopy from x\n",
            "copies are not supported: write the file anew",
            "invalid_arguments",
        ),
        (
            HEAD.replace("a.txt", "../x") + "@@ -1 +1 @@\n-x\n+y\n",
            "the path leaves the workspace",
            "invalid_arguments",
        ),
        (
            HEAD.replace("a.txt", ".etude/x") + "@@ -1 +1 @@\n-x\n+y\n",
            ".etude is read-only",
            "invalid_arguments",
        ),
        (
            HEAD.replace("a.txt", "n\0.txt") + "@@ -1 +1 @@\n-x\n+y\n",
            "a path has no NUL characters",
            "invalid_arguments",
        ),
        (HEAD.replace("a.txt", "no.txt") + "@@ -1 +1 @@\n-x\n+y\n", "no.txt: no such file", None),
        ("--- /dev/null\n+++ b/a.txt\n@@ -0,0 +1 @@\n+y\n", "a.txt: exists already", None),
        (
            "--- a/a.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-one\n",
            "a.txt: has more lines than the patch deletes",
            None,
        ),
        ("diff --git a/a.txt b/b.txt\nrename from a.txt\nrename to b.txt\n", "b.txt: exists already", None),
        (
            HEAD + "@@ -1 +1 @@\n-zzz\n+y\n",
            'hunk 1 of a.txt does not fit at line 1: expected "zzz", found "one"',
            None,
        ),
        (
            HEAD + "@@ -90 +90 @@\n-zzz\n+y\n",
            'hunk 1 of a.txt is beyond the end: expected "zzz", the file has 5 lines',
            None,
        ),
        (HEAD + "@@ @@\n-two\n+2\n", "hunk 1 of a.txt fits at lines 2, 4: give more lines around it", None),
        (
            HEAD + "@@ -3 +3 @@\n-two\n+2\n",
            "hunk 1 of a.txt fits at lines 2, 4: give more lines around it",
            None,
        ),
        (
            HEAD + "@@ @@\n+2\n",
            "hunk 1 of a.txt has neither line numbers nor lines to find its place by",
            None,
        ),
        (
            HEAD + "@@ @@\n-three\n+3\n@@ @@\n-one\n+1\n",
            "hunk 2 of a.txt stands at line 1: order hunks from top to bottom",
            None,
        ),
    ],
)
def test_a_patch_that_makes_no_sense_says_why(patch, message, error):
    result, after = patched(patch, a="one\ntwo\nthree\ntwo\nfive\n", b="b\n")
    assert result.output == f"error: {message}"
    assert result.error == (error or "unexpected_environment")
    assert after == {"a": "one\ntwo\nthree\ntwo\nfive\n", "b": "b\n"}


def test_the_nearest_place_is_taken_where_another_is_far():
    before = "x\n" + "-\n" * 3 + "x\n" + "-\n" * 20
    assert applied(before, HEAD + "@@ -6 +6 @@\n-x\n+y\n") == "x\n" + "-\n" * 3 + "y\n" + "-\n" * 20


def test_blanks_at_line_ends_do_not_matter_and_stay():
    patch = HEAD + "@@ -1,3 +1,3 @@\n a\n-b\n+c\n\n"
    assert applied("a  \nb\t\n   \n", patch) == "a  \nc\n   \n"


def test_a_missing_newline_at_the_end_is_no_obstacle():
    assert applied("a\nb", HEAD + "@@ -1,2 +1,2 @@\n a\n-b\n+c\n") == "a\nc\n"
    assert applied("a\nb", HEAD + "@@ -2 +2,2 @@\n b\n+c\n") == "a\nb\nc\n"
    assert applied("a\nb", HEAD + "@@ -1,2 +1,2 @@\n-a\n+c\n b\n") == "c\nb"
    assert applied("a\nb", HEAD + "@@ -2,0 +3 @@\n+c\n") == "a\nb\nc\n"


def test_the_same_file_twice_is_patched_twice():
    patch = HEAD + "@@ -1 +1 @@\n-x\n+y\n" + HEAD + "@@ -1 +1 @@\n-y\n+z\n"
    assert patched(patch, a="x\n")[1] == {"a": "z\n"}


def test_a_patch_that_changes_nothing_says_so():
    assert patched(HEAD + "@@ -1 +1 @@\n-x\n+x\n", a="x\n")[0].output == "no change"


def test_bytes_that_are_not_text_survive_a_patch():
    edit = call("apply_patch", patch=HEAD + "@@ -2 +2 @@\n-x\n+y\n")
    _, after = run(edit, files={"a.txt": b"\xff\xfe\nx\n\x80"})
    assert after["a.txt"] == b"\xff\xfe\ny\n\x80"
    assert output(edit, files={"a.txt": b"\0"}) == "error: a.txt: binary file"


def test_what_was_written_is_undone_if_a_later_file_cannot_be():
    patch = HEAD + "@@ -1 +1 @@\n-x\n+y\n--- /dev/null\n+++ b/b.txt/c.txt\n@@ -0,0 +1 @@\n+z\n"
    result, after = patched(patch, a="x\n", b="file\n")
    assert result.output.startswith("error: ") and "a part of the path is a file" in result.output
    assert after == {"a": "x\n", "b": "file\n"}


def test_large_and_repetitive_patches_take_linear_time():
    before = "same\n" * 20_000
    body = "".join(" same\n" for _ in range(5_000)) + "-other\n+new\n"
    start = time.process_time()
    with pytest.raises(ToolArgumentError):
        applied(before, HEAD + "@@ -9999 +1 @@\n" + body)
    assert time.process_time() - start < 3
    assert output(call("apply_patch", patch="x" * (2 << 20))) == "error: patch too large"
