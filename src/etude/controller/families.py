"""Families of tasks: the tasks that a run trains on and is evaluated on, and its documents of mid-training.

    tasks.family = "MODULE:FUNCTION"  ──imported, called with the configuration──>  TaskFamily

The families of the quickstart are such functions too, in a package of their own (`examples/quickstart`);
`bug_fixes` and `trails` are short names for them. Only the family of task directories is defined here.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from etude.config import QUICKSTART_FAMILY, RunConfig
from etude.errors import ConfigError, TaskError
from etude.kit.importing import import_callable
from etude.records import Task

if TYPE_CHECKING:
    # Some of them import torch, which commands that show tasks do not need.
    from etude.controller.expert_chats import ScriptedSession
    from etude.evaluation import ActingTasks
    from etude.observe import Observer
    from etude.rollout.collect import TaskSource
    from etude.tokens.renderer import Renderer
    from etude.tokens.tokenizer import Tokenizer
    from etude.training import Document

Messages = list[NDArray[np.int32]]
"""Tokens of each message that a scripted author writes in a session."""


class TaskFamily(Protocol):
    """One family of tasks under one configuration.

    The last four members are for mid-training: a run that begins with a checkpoint calls none of them.
    """

    @property
    def splits(self) -> Sequence[str]:
        """Names for `evaluation_tasks`. A run is evaluated on `heldout` before and after training; also on
        `heldout_family`, and during training on `validation`, if these are among the names."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Messages about the tasks that a run shows as it starts, a line each."""
        ...

    @property
    def acting(self) -> Sequence[ActingTasks]:
        """Further kinds of tasks to train on, reported separately; each has the split `NAME_heldout`."""
        ...

    def source(self) -> TaskSource:
        """The tasks of reinforcement learning, by number. A number must always give the same task: resumed
        runs and replayed sessions request it again."""
        ...

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        """The first tasks of a split, always the same; fewer where it has fewer. Raises ConfigError for a
        split that the family does not have."""
        ...

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        """Trains the tokenizer of a new model."""
        ...

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        """The documents of mid-training. A function of the configuration and the renderer alone."""
        ...

    def scripted_session(self, number: int, renderer: Renderer) -> tuple[Task, Messages]:
        """A task, and the messages with which a scripted author plays it: a run's forecast times them."""
        ...

    def sessions(self, count: int, observer: Observer) -> list[ScriptedSession]:
        """Sessions of a scripted author, for `etude tasks sessions`. Raises ConfigError if there are none."""
        ...


_MEMBERS = [name for name in dir(TaskFamily) if not name.startswith("_")]


def open_family(config: RunConfig, observer: Observer | None = None) -> TaskFamily:
    """The family that a configuration names. `observer`: shows the progress of checking a directory's tasks.

    Raises TaskError for directories of tasks that cannot be read, ConfigError for a family that cannot be
    imported or lacks a member of TaskFamily.
    """
    name = config.tasks.family
    if name == "directory":
        return DirectoryTasks(config, observer)
    family = _import_family(name)(config)
    missing = [member for member in _MEMBERS if not hasattr(family, member)]
    if missing:
        raise ConfigError(
            f"the family lacks {', '.join(missing)}",
            field="tasks.family",
            received=name,
            fix=f"define them, or inherit from {QUICKSTART_FAMILY.replace(':', '.')}",
        )
    return family


def _import_family(name: str) -> Callable[[RunConfig], TaskFamily]:
    """Imports a family. Raises ConfigError, with how to install the quickstart's families."""
    try:
        return import_callable(name, "tasks.family")
    except ConfigError as error:
        package = QUICKSTART_FAMILY.partition(".")[0]
        if isinstance(error.__cause__, ModuleNotFoundError) and package in str(error.__cause__.name):
            error.fix = "install Étude again: pip install -e . (or make)"
        raise


def check_split(split: str, splits: Sequence[str]) -> None:
    """Raises ConfigError for a split that is not among the family's."""
    if split not in splits:
        raise ConfigError("unknown split", field="split", received=split, fix=f"one of {', '.join(splits)}")


class DirectoryTasks:
    """The user's own tasks: a finite set, read once. Mid-training, if there is any, uses the documents of the
    quickstart's bug fixes. Implements `TaskFamily`.

    Without `heldout_directory`, tasks are held out by the `split` of their metadata, which made tasks have:
    tasks of a module are on one side. Where no task has the split `heldout`, a share is held out.
    """

    acting = ()

    def __init__(self, config: RunConfig, observer: Observer | None = None) -> None:
        from etude.controller.task_sets import load_task_set  # with the sandboxes

        def load(field: str) -> tuple[list[Task], list[str]]:
            directory = Path(getattr(config.tasks, field))
            return load_task_set(directory, f"tasks.{field}", config, observer, config.tasks.only)

        self._config = config
        tasks, self.notes = load("directory")
        if config.tasks.heldout_directory:
            judged, notes = load("heldout_directory")
            self._tasks = {"train": tasks, "heldout": judged}
            self.notes += notes
        else:
            self._tasks = _by_split(tasks) or _held_apart(tasks, config.tasks.heldout_share)

    @property
    def splits(self) -> Sequence[str]:
        """See TaskFamily."""
        return tuple(name for name in self._tasks if name != "train")

    def source(self) -> TaskSource:
        from etude.rollout.epochs import EpochSource

        return EpochSource(self._tasks["train"], self._config.seed, self._config.rl.curriculum.epochs)

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        check_split(split, self.splits)
        return self._tasks[split][:count]

    @functools.cached_property
    def _read_first(self) -> TaskFamily:
        return _import_family(QUICKSTART_FAMILY)(self._config)

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        return self._read_first.train_tokenizer(observer)

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        return self._read_first.documents(renderer, observer)

    def scripted_session(self, number: int, renderer: Renderer) -> tuple[Task, Messages]:
        return self._read_first.scripted_session(number, renderer)

    def sessions(self, count: int, observer: Observer) -> list[ScriptedSession]:
        """See TaskFamily: sessions that solve tasks which are trained on, as their reference solutions do."""
        from etude.controller.references import play_references

        return asyncio.run(play_references(self._tasks["train"], count, self._config, observer))


def _by_split(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Tasks by the split of their metadata; tasks without one are for training. Empty if there would be no
    training or no held-out tasks."""
    found: dict[str, list[Task]] = {"train": [], "heldout": [], "validation": []}
    for task in tasks:
        found.get(str(task.metadata.get("split")), found["train"]).append(task)
    if not found["train"] or not found["heldout"]:
        return {}
    return {split: some for split, some in found.items() if some}


def _held_apart(tasks: Sequence[Task], share: float) -> dict[str, list[Task]]:
    """(trained on, held out): a task's side depends on its id, so that added tasks move few others."""
    if len(tasks) < 2:
        raise TaskError(
            "a single task cannot serve for training and for evaluation",
            field="tasks.directory",
            received=len(tasks),
            fix="add tasks, or name tasks.heldout_directory",
        )
    ordered = sorted(tasks, key=lambda task: hashlib.blake2b(task.id.encode()).digest())
    num_judged = min(len(tasks) - 1, math.ceil(share * len(tasks)))
    return {"train": ordered[num_judged:], "heldout": ordered[:num_judged]}
