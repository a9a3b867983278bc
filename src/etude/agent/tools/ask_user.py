"""The tool `ask_user`."""

from __future__ import annotations

from etude.agent.tools.interface import Access, Arguments, ToolContext, failure
from etude.agent.tools.output_files import head_and_tail, readable
from etude.agent.tools.values import TEXTS, lines_of
from etude.errors import ToolArgumentError, UserAbortedError
from etude.records import ToolErrorClass, ToolResult
from etude.tokens.grammar import Parameter, ToolSchema

NUM_OPTIONS = 8
_QUESTION_CHARACTERS = 2000


class AskUser:
    """Asks the giver of the task: a person, or in rollouts a user simulated from what the task withholds.

    Arguments: `question`; `options?`: answers to choose from, one a line or as a JSON list.
    Returns the answer. Every question counts, in `ToolState.num_questions` and as a fact of kind `question`.
    Limits: 2,000 characters, 8 options; of the answer `output_characters`. Waits as long as the user takes.
    Errors: invalid_arguments for an empty question and too many options; user_aborted if there is no user or
    no answer: the agent decides itself.
    """

    repeatable = False
    schema = ToolSchema(
        "ask_user",
        "Ask the user what only the user can know.",
        (
            Parameter("question", "what to ask"),
            Parameter("options", "answers to choose from", required=False, kind="array", schema=TEXTS),
        ),
    )

    def access(self, arguments: Arguments) -> Access:
        return Access(writes=frozenset({"user:"}))

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        question = arguments["question"].strip()
        if not question:
            raise ToolArgumentError("question is empty", field="question")
        if len(question) > _QUESTION_CHARACTERS:
            raise ToolArgumentError(f"more than {_QUESTION_CHARACTERS} characters", field="question")
        options = lines_of(arguments, "options", NUM_OPTIONS)
        context.state.num_questions += 1
        try:
            if context.user is None:
                raise UserAbortedError("no user is there; decide yourself", field="user")
            answer = readable(await context.user.answer(question, options)).strip()
        except UserAbortedError as error:
            return failure(error.message, ToolErrorClass.USER_ABORTED, kind="question", answered=False)
        shown = head_and_tail(answer, context.limits.output_characters)
        return ToolResult(shown or "(no words)", facts={"kind": "question", "answered": True})
