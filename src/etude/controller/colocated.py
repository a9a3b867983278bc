"""Trainer and engine on one device, which they have in turn.

    sessions run            engine: weights, keys and values        trainer: weights
      │ all closed: the engine gives its keys and values back
    step                    engine: weights                         trainer: weights, gradients, states
      │ gradients are dropped, the optimiser's states go to host memory
    publish, stage          engine: weights twice                   trainer: weights
      │ activate: what served before is let go
    sessions run            the first step takes memory for keys and values again

Nobody waits for a turn: the synchronous loop's sessions have ended when the trainer is called, and the engine
refuses to give back what a session still uses. Weights, tokens and order are those of a run that is not
colocated, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from etude.controller.training_part import TrainingPart
from etude.inference import EngineService
from etude.protocols import Handle

_MAKES_ROOM = frozenset({"step", "publish"})
"""Calls before which the engine gives its memory back: published weights come to lie beside those that
serve."""


class ColocatedTrainer(Handle[TrainingPart]):
    """A TrainingPart that has the device while it is called; the engine has it otherwise.

    An error in a step leaves both as between two steps: gradients are gone, states in host memory.
    """

    def __init__(self, trainer: Handle[TrainingPart], engine: EngineService) -> None:
        self.node = trainer.node
        self._trainer = trainer
        self._engine = engine

    @staticmethod
    async def take_turns(trainer: Handle[TrainingPart], engine: EngineService) -> ColocatedTrainer:
        """Begins with the engine's turn. Raises SamplerError while a session is held."""
        await engine.release_memory()
        await trainer.call(TrainingPart.offload_states)
        return ColocatedTrainer(trainer, engine)

    async def send(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """See Handle.send. The metrics of a step tell the time that the exchange took before and after it:
        `handover_s`, without the copies of states that come back in the midst of it."""
        began = time.perf_counter()
        if method in _MAKES_ROOM:
            await self._engine.release_memory()
        if method != "step":
            return await self._trainer.send(method, arguments, named)
        handover_s = time.perf_counter() - began
        try:
            metrics = await self._trainer.send(method, arguments, named)
        finally:
            began = time.perf_counter()
            await self._trainer.call(TrainingPart.offload_states)
        return {**metrics, "handover_s": handover_s + time.perf_counter() - began}

    async def stop(self) -> None:
        await self._trainer.stop()

    def kill(self) -> None:
        self._trainer.kill()
