"""`etude eval TARGET` and `etude eval compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from etude.cli.agent import (
    ContextTokensOption,
    KeyVariableOption,
    ModelNameOption,
    ToolCallsOption,
    ToolsOption,
)
from etude.cli.output import print_json
from etude.cli.progress import open_observer


class _TargetFirst(TyperGroup):
    """Interprets `etude eval TARGET` as `etude eval run TARGET`."""

    default_command = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts the default command if none is given."""
        if args and args[0] not in (*self.commands, "--help"):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


eval_app = typer.Typer(
    name="eval",
    cls=_TargetFirst,
    no_args_is_help=True,
    help="Measure models on tasks that they never saw. `etude eval TARGET` means `etude eval run TARGET`.",
)

TargetArgument = Annotated[
    str, typer.Argument(help="Run directory, checkpoint directory, or http://host:port/v1.")
]
SuiteOption = Annotated[
    str,
    typer.Option("--suite", "--split", help="A frozen split, such as heldout, or a directory of tasks."),
]
SampledTemperatureOption = Annotated[
    float | None,
    typer.Option(min=0, help="Sample at this temperature only. Default: greedily and at temperature 1."),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory for sessions and results. The same command continues an evaluation that was stopped."
    ),
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override agent, images, sandbox or tasks, such as agent.index=meaning. Repeatable.",
    ),
]


@eval_app.command("run")
def run_command(
    target: TargetArgument,
    suite: SuiteOption = "heldout",
    num_tasks: Annotated[int, typer.Option("--tasks", min=1, help="Largest number of tasks.")] = 240,
    num_samples: Annotated[
        int, typer.Option("--samples", min=1, help="Sessions per task at a temperature above 0, for pass@k.")
    ] = 1,
    temperature: SampledTemperatureOption = None,
    parallel: Annotated[
        int, typer.Option(min=0, help="Number of sessions at the same time; 0: chosen for the target.")
    ] = 0,
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint of a run, by its name under checkpoints/. Default: final.")
    ] = None,
    out: OutOption = None,
    model_name: ModelNameOption = "",
    key_variable: KeyVariableOption = "",
    tool_calls: ToolCallsOption = "native",
    context_tokens: ContextTokensOption = 128_000,
    tools: ToolsOption = "",
    settings: SettingsOption = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file whose sections agent, images, sandbox and tasks replace the model's own."
        ),
    ] = None,
    max_turns: Annotated[
        int, typer.Option(min=1, help="Most turns per session, for a model that does not come from a run.")
    ] = 100,
    backend: Annotated[str, typer.Option(help="Sandbox backend: short for --set sandbox.backend=NAME.")] = "",
    input_price: Annotated[float, typer.Option(min=0, help="Price of a million input tokens.")] = 0.0,
    output_price: Annotated[float, typer.Option(min=0, help="Price of a million output tokens.")] = 0.0,
    as_markdown: MarkdownOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure one model: pass rates with intervals, tokens, turns, calls, and what a solved task costs."""
    # Heavy: torch comes with it.
    from etude.controller.evaluation import EvaluationRequest, evaluate
    from etude.controller.evaluation_targets import TargetOptions
    from etude.evaluation import Prices
    from etude.evaluation.results import result_rows

    options = TargetOptions(
        checkpoint,
        model_name,
        key_variable,
        tool_calls == "native",
        context_tokens,
        tools,
        max_turns,
        (*(settings or ()), *([f"sandbox.backend={backend}"] if backend else [])),
        config,
    )
    prices = Prices(input_price, output_price) if input_price or output_price else None
    request = EvaluationRequest(
        target, suite, num_tasks, num_samples, temperature, parallel, out, prices, options
    )
    result = evaluate(request, open_observer())
    figures = result.to_json()
    if as_json:
        print_json(figures)
        return
    num_judged = max(mode.figures["tasks"] for mode in result.modes.values())
    title = f"{result.target['label']} on {suite}, {num_judged} task{'' if num_judged == 1 else 's'}"
    _print_table(title, result_rows(figures), as_markdown)


@eval_app.command("compare")
def compare_command(
    first: Annotated[Path, typer.Argument(help="A directory that `--out` named, or its result.json.")],
    second: Annotated[Path, typer.Argument(help="The same for the second model.")],
    as_markdown: MarkdownOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two models on the same tasks, task by task, with intervals and exact p-values."""
    from etude.evaluation import EvaluationResult, compare_results
    from etude.evaluation.results import comparison_rows, conclusion

    compared = compare_results(EvaluationResult.read(first), EvaluationResult.read(second))
    if as_json:
        print_json(compared)
        return
    for mode in (name for name in ("greedy", "sampled") if name in compared):
        title = f"{compared['suite']}, {mode}"
        _print_table(title, comparison_rows(compared, mode), as_markdown)
        typer.echo(f"{conclusion(compared[mode]['pass_rate'])}\n")


def _print_table(title: str, rows: Sequence[Sequence[str]], as_markdown: bool) -> None:
    from etude.evaluation.results import markdown_table, text_table

    if as_markdown:
        typer.echo(f"**{title}**\n\n{markdown_table(rows)}")
    else:
        typer.echo(f"{title}\n\n{text_table(rows)}")
