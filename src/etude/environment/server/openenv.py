"""An environment as OpenEnv sees it: `reset`, `step`, `state`.

An action is one turn: `{"calls": [{"name", "arguments"}]}`, or `{"message": text}` with calls in our grammar.
The observation holds what the tools answered; when the agent has finished, or has used up its turns, the
episode is graded, and the last observation carries the reward. Failures of the infrastructure are errors of
the protocol, never a reward.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from etude.agent.admission import admit
from etude.agent.tools.text_file import off_loop
from etude.environment.server.creating import create_session
from etude.environment.server.host import Held, SessionHost
from etude.environment.sessions import EnvironmentSession
from etude.environment.wire import calls_of
from etude.errors import AgentError, UserError
from etude.records import Status, ToolCall, ToolResult
from etude.serving.describing import object_schema
from etude.serving.messages import Fields, checked
from etude.tokens.grammar import XmlGrammar, parse_calls

MAX_TURNS = 50
MAX_CALLS = 16
MAX_MESSAGE_CHARACTERS = 16 << 20
_NONE = type(None)
RESET: Fields = {
    "seed": (int, _NONE),
    "episode_id": (str, _NONE),
    "task": (str, dict, _NONE),
    "max_turns": (int, _NONE),
}
_ACTION: Fields = {"calls": (list, _NONE), "message": (str, _NONE), "metadata": (dict, _NONE)}
_OBSERVATION: Fields = {
    "episode_id": (str, _NONE), "text": (str,), "results": (list,), "errors": (list, _NONE),
    "instruction": (str, _NONE), "tools": (list, _NONE), "status": (str, _NONE), "cause": (str, _NONE),
    "passed": (bool, _NONE),
}  # fmt: skip
_STATE: Fields = {
    "episode_id": (str, _NONE), "step_count": (int,), "session": (str, _NONE), "task": (str, _NONE),
    "done": (bool, _NONE), "reward": (float, _NONE), "facts": (dict, _NONE),
}  # fmt: skip


class Episode:
    """One client's episodes, one after the other. `close` must be called at the end."""

    def __init__(self, host: SessionHost, tenant: str) -> None:
        """`tenant`: whose the sessions are."""
        self._host, self._tenant = host, tenant
        self._held: Held | None = None
        self._grammar: XmlGrammar | None = None
        self._max_turns = MAX_TURNS
        self._done = False
        self._reward: float | None = None
        self.episode_id: str | None = None

    async def reset(self, data: object) -> dict[str, Any]:
        """Ends the episode and begins another. Raises UserError, SandboxError."""
        named = {name: value for name, value in checked(data, RESET).items() if value is not None}
        await self.close()
        self._max_turns = named.get("max_turns", MAX_TURNS)
        task = named["task"] if "task" in named else self._choose_task(named.get("seed", 0))
        self._held = await create_session(self._host, self._tenant, {"task": task})
        session, self._done, self._reward = self._held.session, False, None
        self._grammar = XmlGrammar(session.site.tools.schemas)
        self.episode_id = named.get("episode_id") or secrets.token_hex(8)
        tools = [schema.function_schema() for schema in session.site.tools.schemas]
        return self._answer({"instruction": session.instruction, "tools": tools, "results": [], "text": ""})

    async def step(self, action: object) -> dict[str, Any]:
        """One turn. Raises UserError for what is no action, SandboxError if the infrastructure failed."""
        session = self._running()
        message = action.get("message") if isinstance(action, dict) else None
        size = len(message) if isinstance(message, str) else 0
        calls = await off_loop(size, self._calls, action)
        try:
            results = await self._host.run(self._host.find(self._tenant, session.id), calls)
        except AgentError as error:
            return await self._finish(session, Status.AGENT_ERROR, error.message, [])
        if session.finished:
            return await self._finish(session, Status.DONE, "", results)
        if session.num_turns >= self._max_turns:
            return await self._finish(session, Status.LIMIT, "turns", results)
        return self._answer(_observed(results))

    def state(self) -> dict[str, Any]:
        """Where the episode stands."""
        if self._held is None:
            return {"episode_id": None, "step_count": 0}
        session = self._held.session
        return {
            "episode_id": self.episode_id,
            "step_count": session.num_turns,
            "session": session.id,
            "task": session.task.id if session.task else None,
            "done": self._done,
            "reward": self._reward,
            "facts": session.facts.to_dict(),
        }

    async def close(self) -> None:
        """Ends the episode's session. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            await self._host.end(held)

    def _choose_task(self, seed: int) -> str:
        names = sorted(self._host.tasks)
        if not names:
            raise UserError("this server has no tasks", field="task", fix="start it with --tasks DIRECTORY")
        return names[seed % len(names)]

    async def _finish(
        self, session: EnvironmentSession, status: Status, cause: str, results: Sequence[ToolResult]
    ) -> dict[str, Any]:
        outcome = await session.submit(status, cause)
        self._done, self._reward = True, outcome.reward.total
        more = {"status": status.value, "cause": cause, "passed": outcome.verdict.passed}
        return self._answer({**_observed(results), **more})

    def _answer(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {"observation": observation, "reward": self._reward, "done": self._done}

    def _running(self) -> EnvironmentSession:
        if self._held is None or self._done:
            raise UserError(
                "no episode runs", field="step", received="done" if self._done else None, fix="reset first"
            )
        return self._held.session

    def _calls(self, action: object) -> Sequence[ToolCall]:
        """The turn's calls, those that may not run marked with why, as in every session of ours."""
        named = checked(action, _ACTION)
        message, calls = named.get("message"), named.get("calls")
        if (message is None) == (calls is None):
            raise UserError(
                "an action is either calls or a message",
                field="action",
                received=sorted(named),
                fix="give one",
            )
        if calls is not None:
            return admit(calls_of(calls), MAX_CALLS)
        assert self._grammar is not None, "it comes with the session"
        if len(str(message)) > MAX_MESSAGE_CHARACTERS:
            raise UserError(
                "is too long",
                field="action.message",
                received=len(str(message)),
                fix=f"send {MAX_MESSAGE_CHARACTERS} characters at most",
            )
        return admit(parse_calls(self._grammar.parser(text_mode=True), [str(message)]), MAX_CALLS)


def schemas() -> dict[str, Any]:
    """JSON Schemas of action, observation and state."""
    call = object_schema({"name": (str,), "arguments": (dict, _NONE), "error": (str, _NONE)})
    texts = {"type": "array", "items": {"type": "string"}}
    errors = {"type": "array", "items": {"type": ["string", "null"]}}
    return {
        "action": object_schema(_ACTION, calls={"type": ["array", "null"], "items": call}),
        "observation": object_schema(_OBSERVATION, results=texts, errors=errors),
        "state": object_schema(_STATE),
    }


def _observed(results: Sequence[ToolResult]) -> dict[str, Any]:
    outputs = [result.output for result in results]
    return {
        "results": outputs,
        "errors": [result.error.value if result.error else None for result in results],
        "text": "".join(f"<result>{output}</result>" for output in outputs),
    }
