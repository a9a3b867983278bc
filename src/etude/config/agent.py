"""The agent: its prompt format, tools and limits, MCP servers, and a foreign agent in its place."""

from __future__ import annotations

import re
import shlex
from typing import Literal, cast

from pydantic import Field, field_validator, model_validator

from etude.config.base import HttpAddress, Section

TemplateName = Literal["auto", "model", "etude", "chatml", "qwen3", "plain"]
GrammarName = Literal["auto", "hermes", "xml"]
IndexName = Literal["none", "grep", "words", "meaning"]
SEARCHING = ("words", "meaning")
"""Kinds of index with which `semantic_search` works."""
SERVER_NAME = re.compile(r"[a-z][a-z0-9_]*")


class McpConfig(Section):
    """One MCP server. Its tools are called NAME_tool, where NAME is that of this section."""

    command: str = ""
    """Program with its arguments, which speaks MCP over standard input and output. It is started for each
    session, before the agent's first calls run, and ended with it."""
    url: HttpAddress = ""
    """Address of a running server that speaks MCP over streamable HTTP, instead of `command`. The processes
    that run sessions connect to it; all sessions share it."""
    where: Literal["sandbox", "host"] = "sandbox"
    """Where `command` is started. `sandbox`: with the agent's files and the sandbox's programs and network,
    accessible to the agent. `host`: outside of the sandbox, with your rights, without the agent's files."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of `command`, in addition to harmless ones. The value `env:NAME` is replaced by
    the variable NAME of the process that starts it. The agent can read those of a server in the sandbox."""
    tools: tuple[str, ...] = ()
    """Tools that the agent is offered, by the server's names; empty: all."""
    trusted: bool = False
    """Whether to trust the server's annotation that a tool only reads: its calls may then run in parallel,
    and again after a failure."""
    described: str = ""
    """The server's description of its tools when the run started, as JSON. A run fills it in: the model is
    shown these tools, and a session whose server offers others fails."""

    @model_validator(mode="after")
    def _names_one_server(self) -> McpConfig:
        if bool(self.command.strip()) == bool(self.url):
            raise ValueError("needs either command or url")
        if self.url and (self.env or self.where == "host"):
            raise ValueError("env, where: apply only to a server that is started, received some with url")
        if self.where == "host":
            try:
                shlex.split(self.command)
            except ValueError as error:
                raise ValueError(f"command: {error}, received {self.command!r}") from None
        return self

    @property
    def is_in_sandbox(self) -> bool:
        """Whether it runs in the sandbox, with the agent's files."""
        return self.where == "sandbox" and not self.url


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


class AgentConfig(Section):
    """The agent's prompt format and tools, and the limits of one session, for training, evaluation and `etude
    agent`."""

    template: TemplateName = "auto"
    """Format of a conversation. `auto`: Étude's own if the tokenizer has its control tokens, otherwise that
    of the model's chat template; without a chat template ChatML, if the tokenizer has its tokens. `model`:
    that of the chat template, whatever the tokenizer has. `plain`: messages begin with words and end with the
    end-of-text token; for models whose own template is not supported, which learn it by fine-tuning. The
    others by name."""
    grammar: GrammarName = "auto"
    """Format of tool calls. `xml`: as tags. `hermes`: as JSON between `<tool_call>` tags, as in Hermes and
    Qwen models. `auto`: `xml` with Étude's own template; otherwise that of the model's chat template, if it
    lists tools in a known format, or `hermes`."""
    tools: str = "auto"
    """Tools that the agent is offered: `core`, `full`, or names separated by commas, such as
    `read_file,grep,finish`. `auto`: `core` for models with Étude's own template and tags, otherwise `full`.
    The sets include `semantic_search` if `index` supports it."""
    system: str = "auto"
    """Text at the start of the system message, which then lists the tools. `auto`: instructions on how to
    work; no system message for models with Étude's own template, which learn their tools by training."""
    index: IndexName = "none"
    """Index of the code that the agent works on; it follows the agent's edits. `none`: the sandbox searches
    the files. `grep`: `grep` uses an index. `words`: the tool `semantic_search` is added, which compares the
    words of names and lines. `meaning`: it also compares embeddings by all-MiniLM-L6-v2. If `tools` names
    `semantic_search`, `words` is the default."""
    mcp: dict[str, McpConfig] = Field(default_factory=dict)
    """MCP servers whose tools the agent is offered, by the prefix of the tools' names."""
    max_turns: int = Field(default=10, ge=1)
    """Largest number of messages that the agent may write."""
    max_calls_per_turn: int = Field(default=4, ge=1)
    """Largest number of calls of one message that are run; further ones return an error."""
    read_lines: int = Field(default=200, ge=1)
    """Largest number of lines that one call of `read_file` shows."""
    max_tokens: int = Field(default=640, ge=64)
    """Size of one context in tokens: the model's window."""
    max_message_tokens: int = Field(default=96, ge=8)
    """Largest number of tokens in one message."""
    test_failures: int = Field(default=3, ge=1)
    """Largest number of failing tests that one call of `run_tests` shows; the rest are counted."""
    max_session_tokens: int = Field(default=0, ge=0)
    """Largest number of tokens in all contexts of a session together; 0: no limit."""
    summary_at_tokens: int = Field(default=0, ge=0)
    """Number of tokens at which the agent summarises a context and continues in a new one. 0: a full context
    ends the session."""
    max_summary_tokens: int = Field(default=96, ge=1)
    """Largest number of tokens in one summary."""
    summary_jitter: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share by which summaries may come earlier in training, drawn for each context."""
    max_summaries: int = Field(default=1000, ge=0)
    """Largest number of summaries; after that a full context ends the session."""
    summary_request: str = "Summarise."
    """Text that requests a summary. A large model does better with instructions about its contents."""
    harness: HarnessConfig = HarnessConfig()
    """A foreign agent in place of Étude's own."""

    @model_validator(mode="before")
    @classmethod
    def _index_for_search(cls, values: object) -> object:
        """Compatibility with older configurations, which had no key `index` and named `semantic_search`."""
        given = cast(dict[str, object], values)
        if isinstance(values, dict) and "index" not in given and "semantic_search" in str(given.get("tools")):
            return {**given, "index": "words"}
        return given

    @field_validator("mcp")
    @classmethod
    def _check_names(cls, mcp: dict[str, McpConfig]) -> dict[str, McpConfig]:
        for name in mcp:
            if not SERVER_NAME.fullmatch(name):
                raise ValueError(f"a server's name must be lower_snake_case, received {name!r}")
        return mcp
