"""Tokens: the tokenizer, the tool-call grammars, and the one renderer from messages to tokens."""

from etude.tokens.pieces import Control, Piece, spell
from etude.tokens.renderer import Renderer
from etude.tokens.stream import MessageStream
from etude.tokens.template import CHATML_TEMPLATE, ETUDE_TEMPLATE, QWEN3_TEMPLATE, TEMPLATES, Template
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer

__all__ = [
    "CHATML_TEMPLATE",
    "ETUDE_TEMPLATE",
    "QWEN3_TEMPLATE",
    "TEMPLATES",
    "Control",
    "MessageStream",
    "Piece",
    "Renderer",
    "Template",
    "Tokenizer",
    "spell",
    "train_tokenizer",
]
