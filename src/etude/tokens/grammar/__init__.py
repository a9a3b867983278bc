"""Tool-call grammars: how calls are written, and how they are parsed token by token."""

from etude.tokens.grammar.events import ArgumentDelta as ArgumentDelta
from etude.tokens.grammar.events import CallFinished as CallFinished
from etude.tokens.grammar.events import CallStarted as CallStarted
from etude.tokens.grammar.events import ParseEvent as ParseEvent
from etude.tokens.grammar.events import ReasoningDelta as ReasoningDelta
from etude.tokens.grammar.events import TextDelta as TextDelta
from etude.tokens.grammar.events import collect as collect
from etude.tokens.grammar.hermes import HermesGrammar as HermesGrammar
from etude.tokens.grammar.interface import Parameter as Parameter
from etude.tokens.grammar.interface import ToolSchema as ToolSchema
from etude.tokens.grammar.message_parser import Grammar as Grammar
from etude.tokens.grammar.message_parser import ReasoningMarks as ReasoningMarks
from etude.tokens.grammar.message_parser import parse_calls as parse_calls
from etude.tokens.grammar.message_parser import parse_events as parse_events
from etude.tokens.grammar.native import NativeGrammar as NativeGrammar
from etude.tokens.grammar.values import read_value as read_value
from etude.tokens.grammar.xml import XmlGrammar as XmlGrammar
