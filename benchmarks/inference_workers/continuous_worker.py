"""Worker for transformers' continuous batching, kept running between turns, with prefix sharing."""

from __future__ import annotations

import itertools
from typing import Any

from generate_worker import load
from transformers import ContinuousBatchingConfig, GenerationConfig
from work_protocol import Player, Tokens, play_with, serve


class ContinuousBatcher:
    """See Batcher."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._numbers = itertools.count()
        self._sessions: dict[str, int] = {}

    def add(self, session: int, history: Tokens, new: int, output: int) -> None:
        """See Batcher."""
        del new
        name = f"turn-{next(self._numbers)}"
        self._sessions[name] = session
        self._manager.add_request(list(history), name, max_new_tokens=output, eos_token_id=-1)

    def wait(self) -> list[tuple[int, Tokens]]:
        """See Batcher."""
        result = self._manager.get_result(timeout=5.0)
        if result is None:
            if not self._manager.is_running():
                raise RuntimeError("the manager has stopped")
            return []
        if result.error is not None:
            raise RuntimeError(result.error)
        return [(self._sessions.pop(result.request_id), list(result.generated_tokens))]


def make_player(settings: dict[str, Any]) -> Player:
    """See `Player`. Settings: checkpoint, threads, experts, page_tokens, pages, batch_tokens."""
    model = load(settings)
    config = ContinuousBatchingConfig(
        page_size=settings["page_tokens"],
        num_blocks=settings["pages"],
        max_batch_tokens=settings["batch_tokens"],
        use_cuda_graph=False,
    )
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=settings["max_tokens"])
    manager = model.init_continuous_batching(generation, continuous_batching_config=config)
    manager.start()
    batcher = ContinuousBatcher(manager)
    return lambda sessions: play_with(batcher, sessions)


if __name__ == "__main__":
    serve(make_player)
