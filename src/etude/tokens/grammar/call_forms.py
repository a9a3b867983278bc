"""The call syntaxes of published model families, as data: the strings around names, arguments and values.

<tool_call>\\n<function=read_file>\\n<parameter=path>\\na.py\\n</parameter>\\n</function>\\n</tool_call>
└─ section ─┘└─ call ─┘       └ name_end └─ key ──┘                          └── call ───┘└ section ┘
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class CallForm:
    """One call syntax. Pairs are the strings before and after what they name, newlines included; when calls
    are parsed, newlines at the ends of these strings may be missing or doubled.

    Without `call`, a section holds one call and opens its name. Without `key`, the arguments are one JSON
    object after the name.
    """

    name: str
    tags: tuple[str, ...]
    """Those of the strings below that are one token each in the family's tokenizers."""
    section: tuple[str, str]
    """Around all calls of an answer, or if there is `between` or no `call`, around each of them."""
    call: tuple[str, str]
    name_end: str
    """After a name; empty or a newline if the next of these strings ends the name."""
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    """A newline at the start of the first and one at the start of the second are not part of the value."""
    id: tuple[str, str] = ("", "")
    """For calls named by an id: the strings before the name, and between the name and the number."""
    numbers_restart: bool = False
    """Whether numbers restart with every answer; else they continue over a conversation."""
    between: str = ""
    """Between two calls that have a section each."""
    lead: tuple[str, str] = ("\n", "\n")
    """Before the first call: of an answer without text, and after text."""
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
"""Kimi-K2, whose template shows the conversation's own ids."""

KIMI_JSON_RESTARTING = replace(KIMI_JSON, name="kimi_json_restarting", numbers_restart=True)
"""Kimi-K2 as first published: its template numbers the calls of each answer."""

CALL_FORMS = (QWEN_XML, MINIMAX_XML, GLM_XML, GLM_XML_DENSE, KIMI_JSON, KIMI_JSON_RESTARTING)
