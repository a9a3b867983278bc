"""Semantic search: chunks by tree-sitter, ranked by BM25 and embeddings, with edits overlaid."""

from etude.agent.index.semantic.embedding import Embedder as Embedder
from etude.agent.index.semantic.index import SemanticIndex as SemanticIndex
from etude.agent.index.semantic.models import SentenceTransformerEmbedder as SentenceTransformerEmbedder
from etude.agent.index.semantic.models import default_embedder as default_embedder
from etude.agent.index.semantic.overlay import Overlay as Overlay
