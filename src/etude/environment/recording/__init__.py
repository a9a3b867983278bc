"""The recording endpoint: trains any agent that uses an OpenAI- or Anthropic-style API, unmodified.

`session_map` maps its growing histories to token sequences, `service` samples, `live` has the open sessions,
`sessions` stores them, `server` is the HTTP server (and alone needs FastAPI).
"""

from etude.environment.recording.live import LiveSessions as LiveSessions
from etude.environment.recording.live import RecordingLimits as RecordingLimits
from etude.environment.recording.service import AnswerService as AnswerService
from etude.environment.recording.service import Ask as Ask
from etude.environment.recording.session_map import MapLimits as MapLimits
from etude.environment.recording.session_map import SessionMap as SessionMap
from etude.environment.recording.sessions import Recordings as Recordings
from etude.environment.recording.spec import SamplingDefaults as SamplingDefaults
from etude.tokens.chat.renderer_cache import RendererCache as RendererCache
