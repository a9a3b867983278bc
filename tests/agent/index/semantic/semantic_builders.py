"""Helpers for tests of semantic search."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import numpy as np
from numpy.typing import NDArray
from tests.fakes.embedder import HashingEmbedder

from etude.agent.index.semantic import SemanticIndex
from etude.agent.tools.ports import CodeHits

Parameters = ParamSpec("Parameters")

FILES = {
    "shop/cart.py": b"""class Cart:
    '''Things to buy.'''

    def add_item(self, item, number):
        self.items[item] += number

    def total_price(self):
        return sum(item.price * number for item, number in self.items.items())
""",
    "shop/mail.py": b"""def send_receipt(customer, cart):
    message = render(customer, cart)
    smtp.deliver(customer.address, message)
""",
    "zoo/animals.py": b"""def feed_lions(keeper):
    keeper.carry('meat')


def count_zebras(herd):
    return sum(animal.striped for animal in herd)
""",
    "README.md": b"# A shop and a zoo\n\nFeed the animals before noon.\n",
}


class FailingEmbedder(HashingEmbedder):
    """Fails once it has embedded `limit` texts: a build that stops in its middle."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if self.num_embedded + len(texts) > self.limit:
            raise RuntimeError("the model has run away")
        return super().embed(texts)


class TellingEmbedder(HashingEmbedder):
    """Calls `on_batch` in the event loop in which it was made, each time that it has embedded some texts."""

    def __init__(self, on_batch: Callable[[], object]) -> None:
        super().__init__()
        self._loop, self._on_batch = asyncio.get_running_loop(), on_batch

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = super().embed(texts)
        self._loop.call_soon_threadsafe(self._on_batch)
        return rows


def name(number: int, part: int) -> str:
    """Of a function in `many_files`: words that no other function has together."""
    digits = str.maketrans("0123456789", "bcfghjklmp")
    return f"task_n{number}_m{part}".translate(digits)


def many_files(num_files: int, functions: int = 4) -> dict[str, bytes]:
    """Files with functions that all differ."""
    return {
        f"pkg{i % 7}/mod{i}.py": "\n\n".join(
            f"def {name(i, j)}(value):\n    return value * {i} + {j}" for j in range(functions)
        ).encode()
        for i in range(num_files)
    }


def in_loop(test: Callable[Parameters, Coroutine[None, None, None]]) -> Callable[Parameters, None]:
    """Runs a test in an event loop of its own, for a minute at most."""

    @wraps(test)
    def run(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **keywords), 60))

    return run


def digests(index: SemanticIndex) -> dict[str, bytes]:
    """Digest of each indexed file's content, by path."""
    return {path: file.digest for path, file in index._store.files(index._tree).items()}


def places(result: CodeHits) -> list[tuple[str, int, int, str]]:
    """Where hits are."""
    return [(hit.path, hit.first_line, hit.last_line, hit.symbol) for hit in result.hits]


def write(root: Path, files: dict[str, bytes], age_s: float = 100) -> Path:
    """Writes files that seem to be `age_s` old."""
    root.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        found = (root / path).stat()
        os.utime(root / path, (found.st_atime - age_s, found.st_mtime - age_s))
    return root


async def built(
    folder: Path, files: dict[str, bytes], embedder: HashingEmbedder | None = None
) -> SemanticIndex:
    """An index in `folder` that is up to date with files in `folder`/tree."""
    root = write(folder / "tree", files)
    index = await SemanticIndex.open(folder, root, embedder or HashingEmbedder())
    await index.update()
    return index
