"""Measures the speed of each stage of a run on this machine: a few real steps and sessions, on a separate
model.

    mid-training    optimiser steps on the run's own documents
    sessions        a scripted author's messages, at the engine's pace, with real tools and grades
    RL step         the trainer on those sessions

Sessions of an untrained model do not have a realistic cost, so a scripted author writes them: the engine
samples as many tokens as each message has, and the message replaces them. A run with an initial checkpoint
samples its own sessions. The probe does not change the run: it uses another model, and restores PyTorch's
global generator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from etude.agent import open_renderer
from etude.config import FeedbackConfig, RunConfig, WeightsConfig
from etude.controller.arrangement import plays_itself
from etude.controller.compute import choose_device, use_numerics, use_sampling_threads
from etude.controller.engines import serve_model
from etude.controller.families import Messages, TaskFamily
from etude.controller.forecast import Speeds
from etude.controller.parts import Parts, open_parts
from etude.controller.thread_choice import ThreadChoice
from etude.kit.tasks import run_together
from etude.model import LanguageModel
from etude.protocols import Sampler
from etude.records import (
    Group,
    PolicyVersion,
    RewardBreakdown,
    SampleChunk,
    SampleRequest,
    SamplingParams,
    Scores,
    Task,
    TrajectoryId,
)
from etude.tokens.tokenizer import Tokenizer
from etude.training import Document, NextTokenTrainer, RlTrainer, ShuffledDocuments

Clock = Callable[[], float]
Probe = Callable[[RunConfig, LanguageModel, Tokenizer, Sequence[Document], TaskFamily], Speeds]
"""Measures a machine: `probe_speeds`, or figures for tests."""

_WARM_UP_STEPS = 2
_MIDTRAIN_STEPS = (4, 12)
_MIDTRAIN_S = 3.0
"""Least and most mid-training steps that are timed, and the time that bounds their number in between."""
_MAX_GROUPS = 12
_SAMPLING_S = 8.0
"""Time that bounds the number of timed groups, estimated by a first group alone, which is slow."""
_SCRIPTED_SHARE, _SAMPLED_SHARE = 1.3, 0.78
"""Time of sessions and their training in a run, relative to this probe's, where a scripted author writes them
and where a checkpoint samples them. Measured with the quickstart's model, one run each: 132 s of RL and 52 s
of evaluation where the scripted probe said 99 and 39, on a quiet machine; 87 s and 29 s where the sampled one
said 118 and 36, on a busy one."""
_SCHEDULED_STEPS = 1_000
_NAME = "probe"


def can_probe(config: RunConfig) -> bool:
    """Whether a probe can forecast the run: one process on a CPU, with Étude's own engine and agent."""
    alone = config.executor == "local" and config.parallel.ranks == 1 and not config.colocated
    on_cpu = config.device != "cuda" and choose_device(config.device, config.numerics) == "cpu"
    return on_cpu and alone and plays_itself(config)


def probe_speeds(
    config: RunConfig,
    model: LanguageModel,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    family: TaskFamily,
    clock: Clock = time.perf_counter,
) -> Speeds:
    """Measures the speeds, in about ten seconds. `config`: resolved. `model`: the probe's own, changed in
    place. `documents`: of mid-training; none where the run has an initial checkpoint."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            plays = _choose_plays(config, tokenizer, family, scripted=bool(len(documents)))
            config = _without_side_effects(config)
            step_s = _time_midtraining(config, model, documents, clock) if len(documents) else 0.0
            probe = _SessionProbe(config, model, tokenizer, plays, torch.get_num_threads(), clock)
            rl_step_s, session_s = asyncio.run(probe.measure())
        finally:
            torch.set_num_threads(threads)
    return Speeds(step_s, rl_step_s, 2 * config.evaluation.num_tasks * session_s)


def _time_midtraining(
    config: RunConfig, model: LanguageModel, documents: Sequence[Document], clock: Clock
) -> float:
    """Mean wall seconds of a step after slower first ones; sets the number of threads that was fastest."""
    batches = ShuffledDocuments(documents, config.midtrain.tokens_per_step, config.seed)
    trainer, threads = NextTokenTrainer(model, batches, config.midtrain), ThreadChoice(config, model, _NAME)
    for _ in range(_WARM_UP_STEPS):
        trainer.step()
    while not threads.chosen:
        threads.step(trainer.step)
    torch.set_num_threads(threads.chosen)
    least, most = _MIDTRAIN_STEPS
    began, taken = clock(), 0
    while taken < least or (taken < most and clock() - began < _MIDTRAIN_S):
        trainer.step()
        taken += 1
    return (clock() - began) / taken


@dataclass(frozen=True, slots=True)
class _SessionProbe:
    config: RunConfig
    model: LanguageModel
    tokenizer: Tokenizer
    plays: Sequence[tuple[Task, Messages]]
    """The task of each group, and the scripted author's messages, if there are any."""
    training_threads: int
    clock: Clock

    async def measure(self) -> tuple[float, float]:
        """Wall seconds of (an RL step, a session)."""
        rl = self.config.rl
        use_sampling_threads(self.config)
        async with open_parts(self.config, self.tokenizer, self.model) as parts:
            began = self.clock()
            await serve_model(parts.weights, parts.service, self.model, _NAME)
            publish_s = self.clock() - began
            began = self.clock()
            await self._sample(parts, self.plays[:1])
            groups = min(len(self.plays), max(1, round(_SAMPLING_S / (self.clock() - began))))
            began = self.clock()
            sampled = await self._sample(parts, self.plays[:groups])
            scripted = bool(self.plays[0][1])
            share = _SCRIPTED_SHARE if scripted else _SAMPLED_SHARE
            session_s = share * (self.clock() - began) / (groups * rl.group_size)
            train_s = share * self._train(parts, sampled) / groups
        begun = rl.groups_per_step / self.config.plan.useful_share
        rl_step_s = begun * (rl.group_size * session_s + train_s) + publish_s
        return rl_step_s, session_s

    async def _sample(self, parts: Parts, plays: Sequence[tuple[Task, Messages]]) -> list[Group]:
        size, params = self.config.rl.group_size, SamplingParams(temperature=self.config.rl.temperature)
        sessions = await run_together(
            parts.environment.run(
                task,
                TrajectoryId(_NAME, task.id, 0, number, index),
                ScriptedSampler(parts.service, messages),
                (self.config.seed, number, index),
                params,
            )
            for number, (task, messages) in enumerate(plays)
            for index in range(size)
        )
        return [
            Group(f"{_NAME}/{number}", "task", size, tuple(sessions[number * size : (number + 1) * size]))
            for number in range(len(plays))
        ]

    def _train(self, parts: Parts, groups: Sequence[Group]) -> float:
        """Wall seconds of a training step on these groups, after a first one; half of each group's sessions
        are rewarded as solved."""
        torch.set_num_threads(self.training_threads)
        use_numerics(self.model, self.config)
        trainer = RlTrainer(self.model, self.config.rl, _NAME, parts.weights, parts.blobs.get)
        graded = [_half_solved(group) for group in groups]
        trainer.step(graded[:1])
        began = self.clock()
        trainer.step(graded)
        return self.clock() - began


def _choose_plays(
    config: RunConfig, tokenizer: Tokenizer, family: TaskFamily, *, scripted: bool
) -> list[tuple[Task, Messages]]:
    numbers = range(min(config.rl.groups_per_step, _MAX_GROUPS))
    renderer = open_renderer(tokenizer, config.agent)
    if scripted:
        return [family.scripted_session(number, renderer) for number in numbers]
    source = family.source()
    return [(source(number), []) for number in numbers]


def _without_side_effects(config: RunConfig) -> RunConfig:
    """The configuration without a shared weight store, without feedback, which needs lessons, and with enough
    steps for every schedule."""
    midtrain = config.midtrain.model_copy(update={"num_steps": _SCHEDULED_STEPS})
    rl = config.rl.model_copy(update={"num_steps": _SCHEDULED_STEPS, "feedback": FeedbackConfig()})
    return config.model_copy(update={"weights": WeightsConfig(), "midtrain": midtrain, "rl": rl})


def _half_solved(group: Group) -> Group:
    members = enumerate(group.members)
    rewarded = (replace(member, reward=RewardBreakdown(float(index % 2))) for index, member in members)
    return replace(group, members=tuple(rewarded))


class ScriptedSampler:
    """Implements Sampler for one session: samples as many tokens as a scripted author's next message has, and
    replaces them by the message. After the last message the sampler's own tokens are kept."""

    def __init__(self, sampler: Sampler, messages: Sequence[NDArray[np.int32]]) -> None:
        self._sampler = sampler
        self._messages = list(messages)
        self.open, self.close, self.abort = sampler.open, sampler.close, sampler.abort

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        if not self._messages:
            async for chunk in self._sampler.stream(request):
                yield chunk
            return
        message = self._messages.pop(0)
        length = min(len(message), request.params.max_tokens)
        params = replace(request.params, max_tokens=length)
        asked = replace(request, params=params, stop_tokens=frozenset())
        begun = 0
        async for chunk in self._sampler.stream(asked):
            tokens = message[begun : begun + len(chunk.tokens)]
            begun += len(chunk.tokens)
            ended = chunk.finish == "length" and length == len(message)
            yield replace(chunk, tokens=tokens, finish="stop" if ended else chunk.finish)

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        return await self._sampler.score(tokens, version)
