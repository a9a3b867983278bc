"""Worker: the same steps by TRL's GRPOTrainer, in an environment of its own; it shares only the task."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from datasets import Dataset
from rl_task import Clock, prompts, report, reward, settings
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer

_PAD, _END = "<pad>", "<end>"


class Laps(transformers.TrainerCallback):
    """Times each step from the end of the previous one."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clock: loading the model does not count."""
        self.clock.restart()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Ends a step: sampling, rewards and update are done."""
        self.clock.lap()


def word_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with a word per token: `t17` is token 17. No word begins with the name of a special token,
    which would be split off inside words."""
    words = {_PAD: 0, _END: 1} | {f"t{i}": i for i in range(2, vocab_size)}
    inner = Tokenizer(models.WordLevel(words, unk_token=_PAD))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=_PAD, eos_token=_END, padding_side="left"
    )


def main() -> None:
    """Trains and reports. As ours: Dr.GRPO's loss without standard deviation, no KL, no router loss, one
    update per step."""
    asked = settings()
    torch.set_num_threads(asked["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        asked["checkpoint"], **{"dtype": "float32", "attn_implementation": "sdpa"} | asked["model"]
    )
    vocab_size = model.config.vocab_size
    rewards: list[float] = []

    def rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
        found = [reward(list(tokens), vocab_size) for tokens in completion_ids]
        rewards.append(sum(found) / len(found))
        return found

    drawn = prompts(asked["seed"], asked["groups"] * asked["steps"], vocab_size)
    tokenizer = word_tokenizer(vocab_size)
    rows = [{"prompt": " ".join(f"t{token}" for token in tokens)} for tokens in drawn]
    if [tokenizer(row["prompt"])["input_ids"] for row in rows] != drawn:
        raise RuntimeError("the prompts are not those of the other side")
    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            max_steps=asked["steps"],
            per_device_train_batch_size=asked["groups"] * asked["group_size"],
            num_generations=asked["group_size"],
            max_completion_length=asked["completion_tokens"],
            generation_kwargs={"min_new_tokens": asked["completion_tokens"]},
            learning_rate=asked["learning_rate"],
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_beta2=0.999,
            max_grad_norm=1.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            beta=0.0,
            router_aux_loss_coef=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            seed=asked["seed"],
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        laps = Laps()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewarded,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[laps],
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    report(laps.clock, rewards)


if __name__ == "__main__":
    main()
