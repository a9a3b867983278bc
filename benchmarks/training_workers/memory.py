"""Worker: one training step over a large vocabulary, and the process's peak memory."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray


def ours(checkpoint: Path, sequences: list[NDArray[np.int32]]) -> float:
    """Our packed step; returns the loss."""
    from etude.model.huggingface import load_model
    from etude.model.scoring import PackedSequences, packed_logprobs

    model = load_model(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = PackedSequences.pack(sequences)
    targets = torch.tensor([row for row in range(len(batch.tokens)) if row not in set(batch.starts)])
    loss = -packed_logprobs(model, batch, targets)[0].mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def transformers_(checkpoint: Path, sequences: list[NDArray[np.int32]]) -> float:
    """transformers' own loss; sequences are of one length, so nothing is padded."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.from_numpy(np.stack(sequences).astype(np.int64))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def main() -> None:
    """Prints bytes and loss. Settings: side, checkpoint, sequences, length, vocab_size."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    generator = np.random.default_rng(0)
    shape = (asked["sequences"], asked["length"])
    sequences = list(generator.integers(0, asked["vocab_size"], shape).astype(np.int32))
    side = ours if asked["side"] == "ours" else transformers_
    loss = side(Path(asked["checkpoint"]), sequences)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
