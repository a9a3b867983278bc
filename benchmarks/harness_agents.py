"""Published agents for foreign_harness.py: how each is started, and training chats in its format.

mini    mini-swe-agent 2.4.6, with a command in its message's text (Python, OpenAI's chat completions)
claude  Claude Code, with its own tools (a program of npm's, Anthropic's messages)
pi      pi 0.73.1, with its own tool for commands (JavaScript of npm's, OpenAI's chat completions)
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from etude.tokens.chat.dialects import CHAT, MESSAGES, Dialect
from etude.tokens.chat.messages import Opening, SystemWords, UserWords

SYSTEM = "Answer with one command."
Chat = dict[str, Any]
"""A row of `etude sft`'s data: messages, and tools."""


class HarnessAgent(ABC):
    """An agent installed in a directory."""

    max_tokens: ClassVar[int]
    """Limit of a session's context."""
    max_message_tokens: ClassVar[int]
    vocab_size: ClassVar[int]
    memory_bytes: ClassVar[int] = 512 << 20
    """Memory limit of a sandbox."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()

    @abstractmethod
    def command(self) -> str:
        """The command for `etude train --harness`."""

    @abstractmethod
    def chat(self, instruction: str, command: str) -> Chat:
        """A training chat: a session of one command."""


class MiniSweAgent(HarnessAgent):
    """mini-swe-agent: commands in the message text, and prompts short enough for a small model."""

    max_tokens, max_message_tokens, vocab_size = 512, 48, 420
    variables: ClassVar = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    settings: ClassVar = {
        "agent.system_template": SYSTEM,
        "agent.instance_template": "{{task}}",
        "agent.step_limit": "3",
        "model.observation_template": "exit {{output.returncode}}",
        "model.format_error_template": "no command",
    }

    def command(self) -> str:
        words = ["env", *(f"{name}={value}" for name, value in self.variables.items())]
        words += [str(self.directory / "bin" / "mini"), "--model", "openai/etude"]
        words += ["--model-class", "litellm_textbased", "--agent-class", "default"]
        words += ["--config", "mini_textbased.yaml"]
        words += [word for key, value in self.settings.items() for word in ("--config", f"{key}={value}")]
        return f"{shlex.join(words)} --yolo --output /tmp/trajectory.json --task {{instruction}}"

    def chat(self, instruction: str, command: str) -> Chat:
        said = [
            ("system", SYSTEM),
            ("user", instruction),
            ("assistant", f"```mswea_bash_command\n{command}\n```"),
            ("user", "exit 0"),
            ("assistant", "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"),
        ]
        return {"messages": [{"role": role, "content": text} for role, text in said]}


class AgentWithTools(HarnessAgent):
    """An agent that sends tool definitions to the model: chats contain them as the agent sends them."""

    dialect: ClassVar[Dialect]
    tool: ClassVar[str]
    """Name of its tool for shell commands."""
    result: ClassVar[str]
    """The tool's result for a command without output."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._request = self._record_request()

    def chat(self, instruction: str, command: str) -> Chat:
        opening, *said = self.dialect.read(self._request).messages
        assert isinstance(opening, Opening)
        messages: list[Chat] = [{"role": "system", "content": opening.system}]
        for one in said:
            assert isinstance(one, UserWords | SystemWords)
            role = "user" if isinstance(one, UserWords) else "system"
            messages.append({"role": role, "content": one.text.replace("INSTRUCTION", instruction)})
        arguments = json.dumps({"command": command})
        call = {"id": "1", "type": "function", "function": {"name": self.tool, "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": self.result},
            {"role": "assistant", "content": "Done."},
        ]
        return {"messages": messages, "tools": [tool.function_schema() for tool in opening.tools]}

    def _record_request(self) -> Chat:
        """The agent's first request, recorded by an endpoint that refuses it."""
        with _RecordingEndpoint() as endpoint, tempfile.TemporaryDirectory() as home:
            variables = {"ANTHROPIC_BASE_URL": endpoint.url, "OPENAI_BASE_URL": f"{endpoint.url}/v1"}
            variables |= {"ANTHROPIC_API_KEY": "unused", "OPENAI_API_KEY": "unused", "HOME": home}
            # Claude Code runs as root only if this says that it is in a sandbox.
            run = {
                "env": os.environ | variables | {"IS_SANDBOX": "1"},
                "cwd": home,
                "stdin": subprocess.DEVNULL,
            }
            command = self.command().replace("{instruction}", "INSTRUCTION")
            subprocess.run(command, shell=True, **run, timeout=120, capture_output=True)
            return endpoint.requests[0]


class ClaudeCode(AgentWithTools):
    """Claude Code with three of its tools and a short system prompt: about 1,200 prompt tokens."""

    max_tokens, max_message_tokens, vocab_size = 4096, 96, 2048
    memory_bytes = 1 << 30
    dialect, tool, result = MESSAGES, "Bash", "(Bash completed with no output)"
    options: ClassVar = ("--bare", "-p", "--tools", "Bash,Read,Edit", "--system-prompt", SYSTEM)
    options += ("--dangerously-skip-permissions", "--max-turns", "3")

    def command(self) -> str:
        program = str(self.directory / "node_modules" / ".bin" / "claude")
        words = ["env", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", program, *self.options]
        return f"{shlex.join(words)} {{instruction}}"


class Pi(AgentWithTools):
    """pi with only its tool for shell commands and a short system prompt. A file names its endpoint, with a
    context window so large that it never compacts the conversation."""

    max_tokens, max_message_tokens, vocab_size = 1024, 96, 1024
    memory_bytes = 1 << 30
    dialect, tool, result = CHAT, "bash", "(no output)"
    options: ClassVar = ("--provider", "etude", "--model", "etude", "--tools", "bash", "--no-session", "-p")
    options += ("--no-skills", "--no-prompt-templates", "--no-context-files", "--system-prompt", SYSTEM)
    models: ClassVar = """{"providers": {"etude": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "unused",
"api": "openai-completions", "models": [{"id": "etude", "contextWindow": 99999, "maxTokens": 96}]}}}"""

    def command(self) -> str:
        program = str(self.directory / "node_modules" / ".bin" / "pi")
        words = shlex.join(["env", "PI_OFFLINE=1", program, *self.options])
        write = f"cat > ~/.pi/agent/models.json <<END\n{self.models}\nEND\n"
        return f"mkdir -p ~/.pi/agent && {write}{words} {{instruction}}"


@dataclass
class _Endpoint:
    url: str
    requests: list[Chat]


class _RecordingEndpoint:
    """An endpoint on loopback that records the bodies of requests and refuses them with status 400."""

    def __enter__(self) -> _Endpoint:
        kept: list[Chat] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                kept.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_error(400)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return _Endpoint(f"http://127.0.0.1:{self._server.server_port}", kept)

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()


AGENTS: dict[str, type[HarnessAgent]] = {"mini": MiniSweAgent, "claude": ClaudeCode, "pi": Pi}
