"""Worker for transformers' `generate`: one batch of all sessions, turn by turn, padded on the left.

A turn lasts as long as its longest answer: `generate` cannot start a session's next turn while others still
answer. With `keep_cache` the keys of earlier turns are kept, and the padding of short answers stays in the
cache as masked holes; without, each turn computes the whole history anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria
from work_protocol import Player, Sessions, Tokens, serve


class Lengths(StoppingCriteria):
    """Stops each row after its given number of new tokens."""

    def __init__(self, start: int, lengths: Tensor) -> None:
        self._ends = start + lengths

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self._ends


@dataclass
class Batch:
    """All sessions' tokens so far, as rows of one matrix; `mask` is 0 at padding and holes."""

    ids: Tensor
    mask: Tensor
    cache: DynamicCache | None = None

    @staticmethod
    def padded(rows: list[Tokens]) -> Batch:
        """A batch of these rows, padded on the left."""
        width = max(len(row) for row in rows)
        ids = torch.zeros((len(rows), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, width - len(row) :] = torch.tensor(row)
            mask[number, width - len(row) :] = 1
        return Batch(ids, mask)

    def extended(self, other: Batch) -> Batch:
        """This batch's tokens followed by the other's, with this one's cache."""
        ids, mask = torch.cat([self.ids, other.ids], 1), torch.cat([self.mask, other.mask], 1)
        return Batch(ids, mask, self.cache)


def answer(model: Any, batch: Batch, lengths: Tensor) -> Batch:
    """The batch extended by the longest of `lengths`, with holes after shorter answers."""
    start = batch.ids.shape[1]
    cache = batch.cache if batch.cache is not None else DynamicCache(config=model.config)
    ids = model.generate(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        past_key_values=cache,
        max_new_tokens=int(lengths.max()),
        stopping_criteria=[Lengths(start, lengths)],
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    new = torch.arange(ids.shape[1] - start)[None] < lengths[:, None]
    return Batch(ids, torch.cat([batch.mask, new.long()], 1), cache)


def play(model: Any, sessions: Sessions, keep_cache: bool) -> list[list[Tokens]]:
    """See `Player`; returns the tokens sampled in each turn of each session."""
    sampled: list[list[Tokens]] = [[] for _ in sessions]
    histories: list[Tokens] = [[] for _ in sessions]
    live, batch = list(range(len(sessions))), None
    for number in range(max(len(turns) for turns in sessions)):
        going_on = [session for session in live if number < len(sessions[session])]
        if going_on != live:
            live, batch = going_on, None
        turns = [sessions[session][number] for session in live]
        for session, turn in zip(live, turns, strict=True):
            histories[session] += turn.input
        if batch is None or not keep_cache:
            batch = Batch.padded([histories[session] for session in live])
        else:
            batch = batch.extended(Batch.padded([turn.input for turn in turns]))
        start = batch.ids.shape[1]
        batch = answer(model, batch, torch.tensor([turn.output for turn in turns]))
        for row, (session, turn) in enumerate(zip(live, turns, strict=True)):
            tokens = batch.ids[row, start : start + turn.output].tolist()
            sampled[session].append(tokens)
            histories[session] += tokens
    return sampled


def load(settings: dict[str, Any]) -> Any:
    """The model, with the attention and experts that the settings name."""
    torch.set_num_threads(settings["threads"])
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if "experts" in settings:
        options["experts_implementation"] = settings["experts"]
    model = AutoModelForCausalLM.from_pretrained(settings["checkpoint"], **options)
    model.generation_config.eos_token_id = None
    return model.eval()


def make_player(settings: dict[str, Any]) -> Player:
    """See `Player`. Settings: checkpoint, threads, experts, keep_cache."""
    model = load(settings)

    def player(sessions: Sessions) -> int:
        with torch.inference_mode():
            sampled = play(model, sessions, settings["keep_cache"])
        return sum(len(tokens) for turns in sampled for tokens in turns)

    return player


if __name__ == "__main__":
    serve(make_player)
