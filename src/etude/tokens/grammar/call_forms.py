"""How published families write their calls, as data: the words around names, arguments and values.

<tool_call>\\n<function=read_file>\\n<parameter=path>\\na.py\\n</parameter>\\n</function>\\n</tool_call>
└─ section ─┘└─ call ─┘       └ name_end └─ key ──┘                          └── call ───┘└ section ┘
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way to write calls. Pairs stand before and behind what they name, newlines included; where calls
    are read, newlines at the ends of these words may be missing or doubled."""

    name: str
    tags: tuple[str, ...]
    """Those of the words below that are one token each in the family's tokenizers."""
    section: tuple[str, str]
    """Stands around all calls of an answer, or where there is `between`, around each of them."""
    call: tuple[str, str]
    name_end: str
    key: tuple[str, str]
    value: tuple[str, str]
    """A newline that begins the first and one that begins the second are no part of the value."""
    between: str = ""
    """Stands between two calls that have a section each."""
    lead: tuple[str, str] = ("\n", "\n")
    """Stands before the first call: of an answer without words, and behind words."""
    python_words: bool = False
    """Whether booleans and null are written as Python writes them."""


QWEN_XML = CallForm(
    name="qwen_xml",
    tags=("<tool_call>", "</tool_call>"),
    section=("<tool_call>\n", "</tool_call>"),
    between="\n",
    call=("<function=", "</function>\n"),
    name_end=">\n",
    key=("<parameter=", ">"),
    value=("\n", "\n</parameter>\n"),
    lead=("", "\n\n"),
    python_words=True,
)
"""Qwen3-Coder and Qwen3.5."""

MINIMAX_XML = CallForm(
    name="minimax_xml",
    tags=("<minimax:tool_call>", "</minimax:tool_call>"),
    section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    call=('<invoke name="', "</invoke>\n"),
    name_end='">\n',
    key=('<parameter name="', '">'),
    value=("", "</parameter>\n"),
)
"""MiniMax-M2."""

CALL_FORMS = (QWEN_XML, MINIMAX_XML)
