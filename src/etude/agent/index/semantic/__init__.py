"""Semantic search: chunks by tree-sitter, BM25 and embeddings side by side, edits overlaid."""

from etude.agent.index.semantic.building import BuildProgress
from etude.agent.index.semantic.embedding import Embedder, EmbedderMissingError, HashingEmbedder
from etude.agent.index.semantic.index import Hit, SearchResult, SemanticIndex
from etude.agent.index.semantic.merkle import Changes, MerkleTree
from etude.agent.index.semantic.models import OnnxEmbedder, SentenceTransformerEmbedder, default_embedder
from etude.agent.index.semantic.overlay import Overlay
from etude.agent.index.semantic.store import SemanticStore
from etude.agent.index.semantic.tree import DirectoryTree, MappingTree, Tree

__all__ = [
    "BuildProgress",
    "Changes",
    "DirectoryTree",
    "Embedder",
    "EmbedderMissingError",
    "HashingEmbedder",
    "Hit",
    "MappingTree",
    "MerkleTree",
    "OnnxEmbedder",
    "Overlay",
    "SearchResult",
    "SemanticIndex",
    "SemanticStore",
    "SentenceTransformerEmbedder",
    "Tree",
    "default_embedder",
]
