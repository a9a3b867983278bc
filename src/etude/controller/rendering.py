"""How the sessions of a run become tokens."""

from __future__ import annotations

from etude.agent import core_registry
from etude.tokens.grammar import XmlGrammar
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer


def make_renderer(tokenizer: Tokenizer) -> Renderer:
    """The one renderer of sessions with the harness's own tools."""
    return Renderer(tokenizer, XmlGrammar(core_registry().schemas))
