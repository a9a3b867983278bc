"""Tool-call grammars: how calls are written, and how they are parsed token by token."""

from etude.tokens.grammar.events import (
    ArgumentDelta,
    CallFinished,
    CallStarted,
    ParsedMessage,
    ParseEvent,
    ReasoningDelta,
    TextDelta,
    collect,
)
from etude.tokens.grammar.hermes import HermesGrammar
from etude.tokens.grammar.interface import (
    CallParser,
    Grammar,
    Parameter,
    ReasoningMarks,
    ToolSchema,
    parse_calls,
    parse_events,
)
from etude.tokens.grammar.native import NativeGrammar
from etude.tokens.grammar.values import read_value
from etude.tokens.grammar.xml import XmlGrammar

__all__ = [
    "ArgumentDelta",
    "CallFinished",
    "CallParser",
    "CallStarted",
    "Grammar",
    "HermesGrammar",
    "NativeGrammar",
    "Parameter",
    "ParseEvent",
    "ParsedMessage",
    "ReasoningDelta",
    "ReasoningMarks",
    "TextDelta",
    "ToolSchema",
    "XmlGrammar",
    "collect",
    "parse_calls",
    "parse_events",
    "read_value",
]
