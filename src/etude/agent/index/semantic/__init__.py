"""Semantic search: chunks by tree-sitter, BM25 and embeddings side by side, edits overlaid."""

from etude.agent.index.semantic.embedding import Embedder, EmbedderMissingError
from etude.agent.index.semantic.index import BuildProgress, Changes, Hit, SearchResult, SemanticIndex
from etude.agent.index.semantic.models import SentenceTransformerEmbedder, default_embedder
from etude.agent.index.semantic.overlay import Overlay

__all__ = [
    "BuildProgress",
    "Changes",
    "Embedder",
    "EmbedderMissingError",
    "Hit",
    "Overlay",
    "SearchResult",
    "SemanticIndex",
    "SentenceTransformerEmbedder",
    "default_embedder",
]
