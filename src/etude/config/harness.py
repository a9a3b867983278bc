"""A foreign agent in place of Étude's own."""

from __future__ import annotations

from pydantic import Field, field_validator

from etude.config.base import Section


class HarnessConfig(Section):
    """A foreign agent that plays the sessions of training and evaluation; see docs/recording.md.

    `agent.max_tokens`, `max_message_tokens` and `max_session_tokens` hold for it too; the other limits of
    `agent` and the tools are those of Étude's own agent.
    """

    command: str = ""
    """Shell command that runs the agent in each task's sandbox, in its workspace. `{instruction}` is replaced
    by the task's instruction, quoted. Its environment: `ETUDE_INSTRUCTION`, `ETUDE_TASK`, and the endpoint as
    `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. Empty:
    Étude's own agent."""
    directory: str = ""
    """Directory of this machine that contains the agent, such as a Python environment or npm's prefix. It is
    mounted read-only in sandboxes at the same path (`/usr` is mounted in any case). Needs `sandbox.backend =
    "local"`; tasks with an image of their own need the agent in the image. Empty: none."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of the command in seconds. The session is then graded in its current state, with status
    `limit`. A shorter limit of the task itself takes precedence."""
    max_running: int = Field(default=16, ge=1)
    """Largest number of commands that run at the same time."""

    @field_validator("command")
    @classmethod
    def _command_has_words(cls, value: str) -> str:
        if value and not value.strip():
            raise ValueError(
                f"must be a shell command, received {value!r}; leave it out for Étude's own agent"
            )
        return value
