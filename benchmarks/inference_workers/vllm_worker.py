"""Worker for vLLM's engine, in this process, with prefix caching."""

from __future__ import annotations

import itertools
import os
from typing import Any

from work_protocol import Player, Tokens, play_with, serve


class VllmBatcher:
    """See Batcher."""

    def __init__(self, engine: Any, make_params: Any) -> None:
        self._engine = engine
        self._make_params = make_params
        self._numbers = itertools.count()
        self._sessions: dict[str, int] = {}

    def add(self, session: int, history: Tokens, new: int, output: int) -> None:
        """See Batcher."""
        del new
        name = str(next(self._numbers))
        self._sessions[name] = session
        self._engine.add_request(name, {"prompt_token_ids": list(history)}, self._make_params(output))

    def wait(self) -> list[tuple[int, Tokens]]:
        """See Batcher: one step."""
        return [
            (self._sessions.pop(output.request_id), list(output.outputs[0].token_ids))
            for output in self._engine.step()
            if output.finished
        ]


def make_player(settings: dict[str, Any]) -> Player:
    """See `Player`. Settings: checkpoint, threads, sessions, max_tokens, eager, page_tokens."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(settings["threads"]),
    }
    import torch
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=settings["checkpoint"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=settings["eager"],
        enable_prefix_caching=True,
        max_model_len=settings["max_tokens"],
        max_num_seqs=settings["sessions"],
        max_num_batched_tokens=2048,
        block_size=settings["page_tokens"],
        disable_log_stats=True,
    )
    torch.set_num_threads(settings["threads"])

    def params(output: int) -> Any:
        return SamplingParams(
            temperature=0.0,
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    batcher = VllmBatcher(llm.llm_engine, params)
    return lambda sessions: play_with(batcher, sessions)


if __name__ == "__main__":
    serve(make_player)
