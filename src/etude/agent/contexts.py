"""One context of an agent: a segment while it grows, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.agent.recording import Recording
from etude.records import BlobRef, Relation, SamplingParams, Segment, TrajectoryId
from etude.tokens.renderer import Renderer


@dataclass(slots=True, eq=False)
class Context:
    """What the policy sees at once."""

    id: str
    opening: str
    """The words with which it began."""
    recording: Recording = field(default_factory=Recording)
    relation: Relation = Relation.ROOT
    parent: tuple[str, int] | None = None

    def segment(
        self,
        trajectory_id: TrajectoryId,
        params: SamplingParams,
        renderer: Renderer,
        routes: BlobRef | None = None,
    ) -> Segment:
        """The context as a record. `routes` says where the experts of its positions are kept."""
        recording = self.recording
        return Segment(
            id=self.id,
            trajectory_id=str(trajectory_id),
            tokens=recording.tokens,
            sampled=recording.sampled,
            logprobs=recording.logprobs,
            version_spans=recording.version_spans,
            kv_oldest_spans=recording.kv_oldest_spans,
            turn_spans=tuple(recording.turn_spans),
            sampling=params,
            tokenizer_digest=renderer.tokenizer.digest,
            template_digest=renderer.template_digest,
            routes=routes,
            relation=self.relation,
            parent=self.parent,
        )
