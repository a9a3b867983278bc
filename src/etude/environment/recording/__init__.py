"""The recording endpoint: any OpenAI- or Anthropic-style agent can be trained, unmodified.

`session_map` maps its growing histories onto token sequences, `service` samples, `live` holds sessions,
`sessions` stores them, `server` speaks HTTP (and alone needs FastAPI).
"""

from etude.environment.recording.live import LiveSessions, RecordedSession, RecordingLimits
from etude.environment.recording.service import AnswerService, Ask, Serving
from etude.environment.recording.session_map import MapLimits, SessionMap
from etude.environment.recording.sessions import Recordings
from etude.environment.recording.spec import SamplingDefaults, SessionSpec
from etude.tokens.chat.shelf import RendererShelf

__all__ = [
    "AnswerService",
    "Ask",
    "LiveSessions",
    "MapLimits",
    "RecordedSession",
    "RecordingLimits",
    "Recordings",
    "RendererShelf",
    "SamplingDefaults",
    "Serving",
    "SessionMap",
    "SessionSpec",
]
