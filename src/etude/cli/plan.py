"""`etude plan`: what a run would take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from etude.cli.output import output_console, print_json
from etude.config import load_config

if TYPE_CHECKING:
    # Heavy at run time: torch comes with it.
    from etude.controller.planning import MemoryPlan, Plan


def plan_command(
    config: Annotated[Path, typer.Argument(help="TOML file, such as configs/quickstart.toml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrides one value; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Memory, time and cost of the RL stage, before it is begun. An error if it does not fit."""
    from etude.controller.planning import check_fits, make_plan

    plan = make_plan(load_config(config, overrides or []))
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
                "total_bytes": memory.total_bytes,
                "available_bytes": memory.available_bytes,
                "parts": {part.name: part.num_bytes for part in memory.parts},
            }
            for memory in plan.memory
        ],
        "step": dataclasses.asdict(plan.step) | {"step_s": plan.step.step_s},
        "devices": plan.devices,
        "hours": plan.hours,
        "price_per_step": plan.price_per_step,
    }


def _print(plan: Plan) -> None:
    console, sizes = output_console(), plan.sizes
    console.print(
        f"{plan.config.model.architecture}: {sizes.parameters / 1e6:,.1f} M parameters, "
        f"{sizes.active_parameters / 1e6:,.1f} M meet each token; {plan.place.dtype} on {plan.place.device}"
    )
    for memory in plan.memory:
        console.print(_memory_table(memory))
    console.print(_step_table(plan))
    rates = plan.rates
    origin = f"measured on {rates.device}: {', '.join(rates.measured)}" if rates.measured else "as supposed"
    console.print(
        f"rates: {rates.flops_per_s / 1e12:,.2f} TFLOP/s, {rates.bytes_per_s / 1e9:,.0f} GB/s ({origin}); "
        "sessions and shares as supposed in [plan]",
        markup=False,
        soft_wrap=True,
    )


def _memory_table(memory: MemoryPlan) -> Table:
    table = Table(title=f"memory of the {memory.device}", title_justify="left")
    table.add_column("part")
    table.add_column("GB", justify="right")
    table.add_column("")
    for part in memory.parts:
        table.add_row(part.name, f"{part.num_bytes / 1e9:,.2f}", part.why)
    table.add_section()
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    table.add_row(
        "with 5 % of workspace",
        f"{memory.total_bytes / 1e9:,.2f}",
        f"{verdict}: there are {memory.available_bytes / 1e9:,.1f} GB",
    )
    return table


def _step_table(plan: Plan) -> Table:
    step, devices = plan.step, plan.devices
    table = Table(title="one RL step", title_justify="left")
    table.add_column("part")
    table.add_column("s", justify="right")
    table.add_column("")
    rows = (
        ("decoding", step.decode_s, f"{step.sampled_tokens:,.0f} tokens of {step.sessions:,.0f} sessions"),
        ("prefill", step.prefill_s, f"{step.prefill_tokens:,.0f} tokens"),
        ("tools", step.tools_s, "sessions wait side by side"),
        ("training", step.train_s, f"{step.trained_tokens:,.0f} tokens"),
        ("publishing", step.publish_s, ""),
    )
    for name, seconds, what in rows:
        table.add_row(name, f"{seconds:,.2f}", what)
    table.add_section()
    order = "sampling beside training" if step.overlapped else "in turns"
    table.add_row("step", f"{step.step_s:,.2f}", order)
    steps = plan.config.rl.num_steps
    whole = f"{plan.hours:,.2f} hours on {devices} device{'' if devices == 1 else 's'}"
    table.add_row(f"{steps} steps", f"{step.step_s * steps:,.0f}", whole)
    if (price := plan.price_per_step) is not None:
        table.add_row("price", "", f"{price:,.4f} a step, {price * steps:,.2f} in all")
    return table
