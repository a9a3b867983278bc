"""Tokens: the tokenizer, the tool-call grammars, and the renderer from messages to tokens."""

from etude.tokens.pieces import Control as Control
from etude.tokens.pieces import Piece as Piece
from etude.tokens.pieces import spell as spell
from etude.tokens.renderer import Renderer as Renderer
from etude.tokens.stream import MessageStream as MessageStream
from etude.tokens.template import CHATML_TEMPLATE as CHATML_TEMPLATE
from etude.tokens.template import ETUDE_TEMPLATE as ETUDE_TEMPLATE
from etude.tokens.template import QWEN3_TEMPLATE as QWEN3_TEMPLATE
from etude.tokens.template import Template as Template
from etude.tokens.tokenizer import Tokenizer as Tokenizer
from etude.tokens.training import train_tokenizer as train_tokenizer
