"""`etude plan`: an estimate of a run's memory, time and cost."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from etude.cli.config import FileArgument, FileOption, SetOption, chosen_file
from etude.cli.output import JsonOption, output_console, print_json
from etude.config import load_config
from etude.errors import UserError

if TYPE_CHECKING:
    # Heavy at run time: torch comes with it.
    from etude.controller.planning import MemoryPlan, Plan, StepTimes


def plan_command(
    file: FileArgument = None,
    config: FileOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate memory, time and cost of the RL stage before it starts.

    Fails if the run does not fit into memory.
    """
    chosen = chosen_file(file, config)
    if chosen is None:
        raise UserError("no file was given", field="FILE", fix="run etude plan configs/quickstart.toml")
    from etude.controller.planning import check_fits, make_plan

    plan = make_plan(load_config(chosen, overrides or []))
    if as_json:
        print_json(_document(plan))
    else:
        _print(plan)
    check_fits(plan.config, plan.memory)


def _document(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "device": dataclasses.asdict(plan.place),
        "model": dataclasses.asdict(plan.sizes),
        "rates": dataclasses.asdict(plan.rates),
        "memory": [
            {
                "device": memory.device,
                "count": memory.count,
                "total_bytes": memory.total_bytes,
                "available_bytes": memory.available_bytes,
                "parts": {part.name: part.num_bytes for part in memory.parts},
            }
            for memory in plan.memory
        ],
        "processes": dataclasses.asdict(plan.processes) | {"devices": plan.processes.devices},
        "step": dataclasses.asdict(plan.step)
        | {"rollout_s": plan.step.sampled.wall_s, "step_s": plan.step.step_s},
        "hours": plan.hours,
        "price_per_step": plan.price_per_step,
    }


def _print(plan: Plan) -> None:
    console, sizes = output_console(), plan.sizes
    console.print(
        f"{plan.config.model.architecture}: {sizes.parameters / 1e6:,.1f} M parameters, "
        f"{sizes.active_parameters / 1e6:,.1f} M active per token; {plan.place.dtype} on {plan.place.device}"
    )
    for memory in plan.memory:
        console.print(_memory_table(memory))
    console.print(_step_table(plan))
    rates = plan.rates
    origin = f"measured on {rates.device}: {', '.join(rates.measured)}" if rates.measured else "from [plan]"
    console.print(
        f"rates: {rates.flops_per_s / 1e12:,.2f} TFLOP/s, {rates.bytes_per_s / 1e9:,.0f} GB/s ({origin}); "
        "sessions and shares as assumed in [plan]",
        markup=False,
        soft_wrap=True,
    )


def _memory_table(memory: MemoryPlan) -> Table:
    several = f", each of {memory.count}" if memory.count > 1 else ""
    title, takes = f"memory of the {memory.device}{several}", Column("takes", justify="right")
    table = Table("part", takes, "", title=title, title_justify="left")
    for part in memory.parts:
        table.add_row(part.name, _size(part.num_bytes), part.why)
    table.add_section()
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    table.add_row(
        "with 5 % for workspace",
        _size(memory.total_bytes),
        f"{verdict}: {memory.available_bytes / 1e9:,.1f} GB available",
    )
    return table


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def _step_table(plan: Plan) -> Table:
    step = plan.step
    table = Table("part", Column("s", justify="right"), "", title="one RL step", title_justify="left")
    for name, seconds, what in _step_rows(step):
        table.add_row(name, f"{seconds:,.2f}", what)
    table.add_section()
    table.add_row("step", f"{step.step_s:,.2f}", _order(step))
    steps = plan.config.rl.num_steps
    table.add_row(f"{steps} steps", f"{step.step_s * steps:,.0f}", f"{plan.hours:,.2f} hours on {_who(plan)}")
    if (price := plan.price_per_step) is not None:
        table.add_row("price", "", f"{price:,.4f} a step, {price * steps:,.2f} in all")
    return table


def _step_rows(step: StepTimes) -> list[tuple[str, float, str]]:
    sampled, publication = step.sampled, step.publication
    sessions = f"{sampled.sampled_tokens:,.0f} tokens of {sampled.sessions:,.0f} sessions"
    travels = f"{publication.held_s:,.2f} s of it block the trainer; {_size(publication.update_bytes)}"
    rows = [
        ("decoding", sampled.decode_s, sessions),
        ("prefill", sampled.prefill_s, f"{sampled.prefill_tokens:,.0f} tokens"),
        ("agents", sampled.turns_s, "in the engine's process" if sampled.in_turn else "beside the engines"),
        ("tools", sampled.tools_s, "sessions wait in parallel"),
        ("training", step.train_s, f"{step.trained_tokens:,.0f} tokens"),
        ("publishing", publication.total_s, travels),
    ]
    if step.validation_s:
        rows.append(("validation", step.validation_s, "share of one step, if there are such tasks"))
    if step.evaluations:
        what = f"in parallel, every {1 / step.evaluations:,.0f} steps"
        what += "; TAKES LONGER THAN THAT: some are skipped" if step.left_out else ""
        rows.append(("evaluation", step.evaluation_s, what))
    return rows


def _order(step: StepTimes) -> str:
    if not step.is_beside:
        return "sampling and training alternate"
    order = "sampling in parallel with training" + (", on the same cores" if step.shares_cores else "")
    return order + (", weights are transferred meanwhile" if step.overlapped else "")


def _who(plan: Plan) -> str:
    """The devices and processes of the run, in words."""
    processes, devices = plan.processes, plan.processes.devices
    text = "one machine" if processes.on_one_machine and devices == 1 else f"{devices} devices"
    if devices == 1 and not processes.on_one_machine:
        text = "1 device"
    if processes.elsewhere:
        text += f", {processes.elsewhere} of them in other clusters"
    if processes.borrowed:
        text += f", and {processes.borrowed:,.2g} borrowed replicas"
    if processes.workers:
        text += f", {processes.workers} rollout workers"
    return text
