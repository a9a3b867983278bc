"""How published families write their calls, as data: the words around names, arguments and values.

<tool_call>\\n<function=read_file>\\n<parameter=path>\\na.py\\n</parameter>\\n</function>\\n</tool_call>
└─ section ─┘└─ call ─┘       └ name_end └─ key ──┘                          └── call ───┘└ section ┘
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way to write calls. Pairs stand before and behind what they name, newlines included; where calls
    are read, newlines at the ends of these words may be missing or doubled.

    Without `call`, a section holds one call and opens its name. Without `key`, the arguments are one JSON
    object behind the name.
    """

    name: str
    tags: tuple[str, ...]
    """Those of the words below that are one token each in the family's tokenizers."""
    section: tuple[str, str]
    """Stands around all calls of an answer, or where there is `between` or no `call`, around each of them."""
    call: tuple[str, str]
    name_end: str
    """Stands behind a name; nothing but a newline where the next of these words ends it."""
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    """A newline that begins the first and one that begins the second are no part of the value."""
    id: tuple[str, str] = ("", "")
    """Where a call is named by an id: what stands before its name, and between that and its number."""
    numbers_restart: bool = False
    """Whether the numbers begin anew with every answer, and else run on over a conversation."""
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

GLM_XML = CallForm(
    name="glm_xml",
    tags=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    section=("<tool_call>", "</tool_call>"),
    between="\n",
    call=("", ""),
    name_end="\n",
    key=("<arg_key>", "</arg_key>\n"),
    value=("<arg_value>", "</arg_value>\n"),
    lead=("", "\n"),
)
"""GLM-4.5 and GLM-4.6."""

GLM_XML_DENSE = replace(
    GLM_XML,
    name="glm_xml_dense",
    between="",
    name_end="",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    lead=("", ""),
)
"""GLM-4.7."""

KIMI_JSON = CallForm(
    name="kimi_json",
    tags=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    name_end="<|tool_call_argument_begin|>",
    id=("functions.", ":"),
    lead=("", ""),
)
"""Kimi-K2, whose template shows the ids that a conversation brings."""

KIMI_JSON_RESTARTING = replace(KIMI_JSON, name="kimi_json_restarting", numbers_restart=True)
"""Kimi-K2 as it was first published: its template numbers the calls of each answer."""

CALL_FORMS = (QWEN_XML, MINIMAX_XML, GLM_XML, GLM_XML_DENSE, KIMI_JSON, KIMI_JSON_RESTARTING)
