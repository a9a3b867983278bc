"""A simulated user: answers from facts that a task withholds, deterministically, without a model.

A task may leave out of its instruction what its author knows ("amounts are in cents"). An agent that asks
gets it, one that guesses does not: so an agent can learn to ask, and that asking has a cost.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.errors import UserAbortedError

UNKNOWN = "I don't know."
NUM_ANSWERS = 8
"""Number of different questions that are answered; repeated questions do not count."""
_WORD = re.compile(r"[A-Za-z]+|[0-9]+")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ENOUGH = 0.25
"""Share of a question's weight that a fact must hold to answer it."""
_K1, _B = 1.2, 0.75
_STOP_WORD_LIST = """
a about all am an and any are as at be been being both but by can could did do does doing each for from
had has have having here how i if in into is it its just like me more most my need no not of on only or
other our please same should so some such tell than that the their them then there these they this those
to too us use used user want was we were what when where which while who why will with would you your
"""
_STOP_WORDS = frozenset(_STOP_WORD_LIST.split())


@dataclass(slots=True)
class SimulatedUser:
    """Implements `tools.ports.User`. Deterministic: the same question always has the same answer.

    A question is answered by the fact that fits it best (BM25 over words, identifiers split), if it fits well
    enough; with options by the option that this fact speaks for, else by the fact.
    """

    facts: Sequence[str]
    """The withheld facts, one sentence each."""
    _answers: dict[str, str] = field(init=False, default_factory=dict[str, str])
    _words: list[Counter[str]] = field(init=False)
    _weights: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self._words = [Counter(words(fact)) for fact in self.facts]
        spread = Counter(word for fact in self._words for word in fact)
        self._weights = {word: _weight(len(self._words), number) for word, number in spread.items()}

    async def answer(self, question: str, options: Sequence[str] = ()) -> str:
        """See User.answer. Raises UserAbortedError beyond `NUM_ANSWERS` different questions."""
        key = " ".join([*sorted(set(words(question))), "|", *options])
        if key in self._answers:
            return self._answers[key]
        if len(self._answers) >= NUM_ANSWERS:
            raise UserAbortedError("the user answers no more questions; decide yourself", field="question")
        fact = self._best_fact(set(words(question)), set(words(" ".join(options))))
        self._answers[key] = answer = UNKNOWN if fact is None else _choose_option(options, fact)
        return answer

    def _best_fact(self, question: set[str], options: set[str]) -> str | None:
        """The fact with the highest score, the first of equals; None if none fits well enough."""
        rare = _weight(len(self._words), 1)
        asked = sorted(question | options)
        enough = _ENOUGH * sum(self._weights.get(word, rare) for word in question)
        mean_words = max(1.0, sum(map(Counter.total, self._words)) / max(1, len(self._words)))
        best, best_score = None, 0.0
        for sentence, fact in zip(self.facts, self._words, strict=True):
            shared = [word for word in asked if word in fact]
            if sum(self._weights[word] for word in shared) < enough:
                continue
            length = 1 - _B + _B * fact.total() / mean_words
            score = sum(
                self._weights[word] * fact[word] * (_K1 + 1) / (fact[word] + _K1 * length) for word in shared
            )
            if score > best_score:
                best, best_score = sentence, score
        return best


def words(text: str) -> list[str]:
    """Stems of a text's words without stop words: identifiers split, lower case."""
    parts = (part for word in _WORD.findall(text) for part in _HUMP.split(word))
    return [_stem(part) for part in map(str.lower, parts) if part not in _STOP_WORDS]


def _weight(num_facts: int, holding: int) -> float:
    """BM25's inverse document frequency of a word that `holding` of the facts hold."""
    return math.log1p((num_facts - holding + 0.5) / (holding + 0.5))


def _stem(word: str) -> str:
    """The word without the commonest endings; only agreement between forms of one word matters."""
    for endings in (("es", "s"), ("ing", "ed"), ("e",)):
        ending = next((e for e in endings if word.endswith(e) and len(word) - len(e) >= 3), "")
        word = word.removesuffix(ending)
    return word


def _choose_option(options: Sequence[str], fact: str) -> str:
    """The option with the highest share of its words in the fact; the fact itself if none is unique."""
    known = set(words(fact))
    shares = [len(known & set(words(option))) / max(1, len(set(words(option)))) for option in options]
    best = max(shares, default=0.0)
    return options[shares.index(best)] if best > 0 and shares.count(best) == 1 else fact
