"""The family `bug_fixes`: small repositories with a planted bug, and the mid-training data for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, cast

from etude.config import RunConfig
from etude.controller.families import Messages, TaskFamily, check_split
from etude.records import Task
from etude_quickstart.acting import ACTING_SUITES, ActingFamily, MixedSource
from etude_quickstart.expert import Expert
from etude_quickstart.frozen import acting_tasks, evaluation_tasks
from etude_quickstart.generator import FunctionSplit, Split, TaskGenerator
from etude_quickstart.observed import CEILING, mask_output

if TYPE_CHECKING:
    # Some of these, and the corpus, import the agent and the sandboxes, which tasks alone do not need.
    from etude.controller.expert_chats import ScriptedSession
    from etude.evaluation import ActingTasks
    from etude.observe import Observer
    from etude.rollout.collect import TaskSource
    from etude.tokens.renderer import Renderer
    from etude.tokens.tokenizer import Tokenizer
    from etude.training import Document


class BugFixes:
    """Small repositories with a planted bug. A family of your own can inherit from it: members that it does
    not override, such as tokenizer and mid-training data, are those of the quickstart."""

    splits: Sequence[str] = ("heldout", "validation", "heldout_family", *ACTING_SUITES)
    notes: Sequence[str] = ()

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    def acting(self) -> Sequence[ActingTasks]:
        """See TaskFamily."""
        tasks = self.config.tasks
        if not (tasks.observed_share or tasks.composed_share):
            return []
        from etude.evaluation import ActingTasks

        observed = ActingTasks("observed", mask_output, CEILING)
        shares = ((observed, tasks.observed_share), (ActingTasks("composed"), tasks.composed_share))
        return [kind for kind, share in shares if share]

    def source(self) -> TaskSource:
        """See TaskFamily."""
        seed, tasks = self.config.seed, self.config.tasks
        fixes = TaskGenerator(seed, "train", level_weights=self.config.rl.level_weights)
        shares: dict[ActingFamily, float] = {
            "observed": tasks.observed_share,
            "composed": tasks.composed_share,
        }
        shares = {name: share for name, share in shares.items() if share}
        return MixedSource(seed, fixes.task, shares) if shares else fixes.task

    def evaluation_tasks(self, split: str, count: int) -> list[Task]:
        """See TaskFamily."""
        check_split(split, self.splits)
        if split in ACTING_SUITES:
            name, _, acting_split = split.partition("_")
            return acting_tasks(cast(ActingFamily, name), cast(FunctionSplit, acting_split), count)
        return evaluation_tasks(cast(Split, split), count)

    def train_tokenizer(self, observer: Observer) -> Tokenizer:
        """See TaskFamily."""
        from etude_quickstart import corpus

        midtrain = self.config.midtrain
        sessions = corpus.load_sessions(min(midtrain.num_sessions, corpus.TOKENIZER_SESSIONS), observer)
        num_observed = min(midtrain.num_observed_sessions, corpus.TOKENIZER_OBSERVED)
        sessions += corpus.load_sessions(num_observed, observer, corpus.OBSERVED_SESSIONS)
        return corpus.train_corpus_tokenizer(sessions, self.config.tokenizer.vocab_size, self.config.agent)

    def documents(self, renderer: Renderer, observer: Observer) -> list[Document]:
        """See TaskFamily."""
        from etude_quickstart import corpus

        midtrain = self.config.midtrain
        sessions = corpus.load_sessions(midtrain.num_sessions, observer)
        sessions += corpus.load_sessions(midtrain.num_observed_sessions, observer, corpus.OBSERVED_SESSIONS)
        sessions += corpus.load_sessions(midtrain.num_part_sessions, observer, corpus.PART_SESSIONS)
        fixes = corpus.load_fixes(midtrain.num_fix_documents, observer)
        return corpus.make_documents(sessions, fixes, renderer, midtrain, self.config.agent.max_tokens)

    def scripted_session(self, number: int, renderer: Renderer) -> tuple[Task, Messages]:
        """See TaskFamily."""
        from etude_quickstart.corpus import CORPUS_SEED
        from etude_quickstart.sessions import played_messages

        task = TaskGenerator(CORPUS_SEED, "train").task(number)
        return task, played_messages(task, Expert(task, Random(number)), renderer, self.config)

    def sessions(self, count: int, observer: Observer) -> list[ScriptedSession]:
        """See TaskFamily."""
        from etude_quickstart.corpus import load_sessions

        return load_sessions(count, observer)


_: Callable[[RunConfig], TaskFamily] = BugFixes  # the type checker reports missing members
