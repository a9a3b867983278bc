"""Fill in the middle (FIM): documents are rearranged, so that a causal model learns to complete gaps.

    PSM   <prefix> before <suffix> after <middle> between <end>
    SPM   <prefix> <suffix> after <middle> before between <end>

(Bavarian et al. 2022, who cut at random characters and show no loss in left-to-right modelling.) A text is
cut between characters and each part is tokenised separately, as in an editor's request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.tokens.tokenizer import Tokenizer

SENTINELS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
)
"""Names of the prefix, suffix and middle tokens in known tokenizers."""
RESERVED_TOKENS = 16
"""By how much a rearranged document may grow: three sentinels, and words that are cut at two positions."""
OWN_SENTINELS = SENTINELS[0]
"""The sentinels of tokenizers that Étude trains."""


@dataclass(frozen=True, slots=True)
class Infilling:
    """Rearranges documents for one tokenizer. Stateless."""

    tokenizer: Tokenizer
    prefix: int
    suffix: int
    middle: int

    @staticmethod
    def find(tokenizer: Tokenizer) -> Infilling | None:
        """An Infilling with the sentinels of the tokenizer; None if it has none."""
        for names in SENTINELS:
            if all(tokenizer.has_control(name) for name in names):
                return Infilling(tokenizer, *(tokenizer.control_id(name) for name in names))
        return None

    @staticmethod
    def of(tokenizer: Tokenizer) -> Infilling:
        """As `find`. Raises ConfigError if there are none."""
        found = Infilling.find(tokenizer)
        if found is None:
            raise ConfigError(
                "the tokenizer has no fill-in-the-middle tokens",
                field="pretrain.fim_rate",
                received="none of " + ", ".join(names[0] for names in SENTINELS),
                fix="set it to 0, or add them with Tokenizer.with_control_tokens",
            )
        return found

    def rearrange(
        self, tokens: NDArray[np.int32], end_token: int | None, spm_share: float, random: np.random.Generator
    ) -> NDArray[np.int32] | None:
        """The document cut at two random positions and rearranged; None if it is too short."""
        body, ending = tokens, tokens[:0]
        if end_token is not None and len(tokens) and tokens[-1] == end_token:
            body, ending = tokens[:-1], tokens[-1:]
        data = self.tokenizer.decode_bytes(body)
        # Documents are cut only before bytes that begin a character.
        places = np.flatnonzero((np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80)
        if len(places) < 3:
            return None
        first, second = np.sort(random.choice(len(places), 2, replace=False))
        first, second = int(places[first]), int(places[second])
        before, between, after = (
            self.tokenizer.encode(part) for part in (data[:first], data[first:second], data[second:])
        )
        marks = np.array([self.prefix, self.suffix, self.middle], dtype=np.int32)
        if random.random() < spm_share:
            parts = (marks[:1], marks[1:2], after, marks[2:], before, between, ending)
        else:
            parts = (marks[:1], before, marks[1:2], after, marks[2:], between, ending)
        return np.concatenate(parts)

    def middles(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[T] True after the middle sentinel: in PSM the text to fill in, with the end token."""
        return np.cumsum(np.concatenate(([0], tokens[:-1] == self.middle))) > 0
