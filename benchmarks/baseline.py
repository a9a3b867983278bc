"""The baseline: straightforward eager PyTorch without optimisation. Shares no code with the package.

Same architecture (Qwen3-MoE) and weights, under Hugging Face's names. Each session has its keys and values in
a tensor of its own; every decode step gathers them, padded, for all live sessions; prompts and observations
are prefilled in one padded batch; experts are a loop with `index_add`; training pads its batches and computes
all logits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MICRO_BATCH = 16
CISPO_CAP = 5.0


@dataclass(eq=False)
class Session:
    """A recorded session, replayed with its recorded tokens [T]."""

    tokens: Tensor
    messages: list[tuple[int, int]]  # (first, one past the last) sampled token of each
    logprobs: Tensor = field(init=False)  # [T] filled in by `replay`; 0 where nothing was sampled
    kv: Tensor | None = None  # [layers, 2, kv_heads, computed tokens, head_dim]
    message: int = 0
    position: int = 0  # of the token that is drawn next
    due: int = 0

    def __post_init__(self) -> None:
        self.logprobs, self.position = torch.zeros(len(self.tokens)), self.messages[0][0]

    def next_message(self, due: int) -> bool:
        self.message, self.due = self.message + 1, due
        if self.message < len(self.messages):
            self.position = self.messages[self.message][0]
        return self.message < len(self.messages)


@dataclass
class Work:
    """Counted as in the engine: prefill samples a message's first token and computes the last one's keys."""

    tokens: int = 0
    seconds: float = 0.0


class Baseline(torch.nn.Module):
    """The model. `config` and `tensors` as in a Hugging Face directory."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.weights = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
        dim, positions = config["head_dim"], config["max_position_embeddings"]
        frequencies = config["rope_parameters"]["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
        angles = torch.outer(torch.arange(positions).double(), frequencies).repeat(1, 2)
        self.cosine, self.sine = angles.cos().float(), angles.sin().float()
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.weights[name].copy_(tensor)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, past: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens, positions [B, T], mask [B, 1, T, P + T], past [B, layers, 2, kv_heads, P, dim]
        -> hidden [B, T, width] and the new keys and values [B, layers, 2, kv_heads, T, dim]."""
        hidden = F.embedding(tokens, self.weights["model.embed_tokens.weight"])
        rotation = self.cosine[positions][:, None], self.sine[positions][:, None]
        new: list[Tensor] = []
        for layer in range(self.config["num_hidden_layers"]):
            normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm")
            attended, kv = self._attend(layer, normed, rotation, mask, past)
            hidden = hidden + attended
            new.append(kv)
            normed = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm")
            hidden = hidden + self._experts(layer, normed.flatten(0, 1)).view_as(hidden)
        return self._norm(hidden, "model.norm"), torch.stack(new, 1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def _attend(
        self, layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        name, shape = f"model.layers.{layer}.self_attn", (*x.shape[:2], -1, self.config["head_dim"])
        q, k, v = (F.linear(x, self.weights[f"{name}.{part}_proj.weight"]).view(shape) for part in "qkv")
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q = self._rotate(self._norm(q, f"{name}.q_norm"), *rotation)
        k = self._rotate(self._norm(k, f"{name}.k_norm"), *rotation)
        kv = torch.stack((k, v), 1)
        if past is not None:
            k, v = torch.cat((past[:, layer, 0], k), 2), torch.cat((past[:, layer, 1], v), 2)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return F.linear(out.transpose(1, 2).flatten(2), self.weights[f"{name}.o_proj.weight"]), kv

    @staticmethod
    def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cosine + torch.cat((-right, left), -1) * sine

    def _experts(self, layer: int, x: Tensor) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        router = F.linear(x, self.weights[f"{name}.gate.weight"]).softmax(-1)
        gates, chosen = router.topk(self.config["num_experts_per_tok"], dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(self.config["num_experts"]):
            rows, place = torch.where(chosen == expert)
            gate, up, down = (
                f"{name}.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")
            )
            inner = F.silu(F.linear(x[rows], self.weights[gate])) * F.linear(x[rows], self.weights[up])
            out = out.index_add(0, rows, F.linear(inner, self.weights[down]) * gates[rows, place, None])
        return out

    def _logprobs(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weights["model.embed_tokens.weight"]).log_softmax(-1)

    @torch.no_grad()
    def replay(self, sessions: Sequence[Session], delay: int, prefill: Work, decode: Work) -> None:
        """Samples sessions that begin together; a message's tool results arrive `delay` steps after it."""
        clock, waiting, decoding = 0, list(sessions), list[Session]()
        while waiting or decoding:
            arrived = [session for session in waiting if session.due <= clock]
            waiting = [session for session in waiting if session.due > clock]
            for batch, work in ((arrived, prefill), (decoding, decode)):
                began = time.perf_counter()
                work.tokens += self._extend(batch) if batch else 0
                work.seconds += time.perf_counter() - began
            clock = clock + 1 if arrived or decoding else min(session.due for session in waiting)
            decoding = [*decoding, *arrived]
            ended = [s for s in decoding if s.position == s.messages[s.message][1]]
            decoding = [s for s in decoding if s.position < s.messages[s.message][1]]
            waiting += [session for session in ended if session.next_message(clock + delay)]

    def _extend(self, sessions: Sequence[Session]) -> int:
        """Computes the new tokens of each session and samples its next; returns the number computed."""
        starts = [0 if s.kv is None else s.kv.shape[3] for s in sessions]
        counts = [s.position - start for s, start in zip(sessions, starts, strict=True)]
        past_length, longest = max(starts), max(counts)
        tokens = torch.zeros(len(sessions), longest, dtype=torch.long)
        shape = (self.config["num_hidden_layers"], 2, self.config["num_key_value_heads"])
        past = torch.zeros(len(sessions), *shape, past_length, self.config["head_dim"])
        for i, (session, start, count) in enumerate(zip(sessions, starts, counts, strict=True)):
            tokens[i, :count] = session.tokens[start : start + count]
            if session.kv is not None:
                past[i, :, :, :, :start] = session.kv
        begin, column = torch.tensor(starts)[:, None], torch.arange(longest)
        seen = (torch.arange(past_length) < begin)[:, None].expand(-1, longest, -1)
        causal = (column[:, None] >= column).expand(len(sessions), -1, -1)
        positions = (begin + column).clamp(max=len(self.cosine) - 1)
        hidden, new = self(tokens, positions, torch.cat((seen, causal), -1)[:, None], past)
        logprobs = self._logprobs(hidden[torch.arange(len(sessions)), torch.tensor(counts) - 1])
        torch.multinomial(logprobs.exp(), 1)
        for i, (session, count) in enumerate(zip(sessions, counts, strict=True)):
            fresh = new[i, :, :, :, :count]
            session.kv = fresh.clone() if session.kv is None else torch.cat((session.kv, fresh), 3)
            session.logprobs[session.position] = logprobs[i, session.tokens[session.position]]
            session.position += 1
        return sum(counts)

    def train_step(self, updates: Sequence[Sequence[Mapping[str, Tensor]]]) -> None:
        """One optimiser update (CISPO) per list of sequences: tokens, sampled, logprobs, advantages [T]."""
        for update in updates:
            total = sum(int(sequence["sampled"].sum()) for sequence in update)
            for batch in _padded(update):
                chosen = self.score(batch["tokens"])
                ratio = (chosen.detach() - batch["logprobs"][:, 1:]).exp().clamp(max=CISPO_CAP)
                loss = -ratio * batch["advantages"][:, 1:] * chosen * batch["sampled"][:, 1:]
                (loss.sum() / total).backward()
            torch.nn.utils.clip_grad_norm_(self.weights.values(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def score(self, tokens: Tensor) -> Tensor:
        """tokens [B, T], padded at the end -> log-probabilities [B, T - 1] of tokens 1 to T - 1."""
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        hidden, _ = self(tokens, torch.arange(length).expand(tokens.shape), causal)
        return self._logprobs(hidden)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


def _padded(sequences: Sequence[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    pad = torch.nn.utils.rnn.pad_sequence
    for start in range(0, len(sequences), MICRO_BATCH):
        part = sequences[start : start + MICRO_BATCH]
        yield {name: pad([s[name] for s in part], batch_first=True) for name in part[0]}
