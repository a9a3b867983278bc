"""`etude sample`: runs sessions of a training run on another cluster."""

from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import asdict
from typing import Annotated, Any

import typer

from etude.cli.exits import EXIT_INTERRUPTED, error_console
from etude.cli.output import print_json
from etude.cli.progress import open_observer
from etude.kit.secrets import read_secret

ControlOption = Annotated[str, typer.Option("--control", help="Control API of the run: http://HOST:PORT.")]
TokenOption = Annotated[str, typer.Option("--token", help="Source of its token: file:PATH or env:NAME.")]
NameOption = Annotated[
    str | None, typer.Option(help="Unique name of this cluster. Default: this machine's name.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value of the run. Repeatable."),
]
RelayOption = Annotated[
    str, typer.Option("--relay", help="Source of weights. Short for --set weights.read_url=URL.")
]
PatienceOption = Annotated[
    float, typer.Option("--patience-s", min=0, help="Seconds to wait for an unreachable run or store.")
]
DrainOption = Annotated[
    float, typer.Option("--drain-s", min=0, help="Seconds to finish sessions after SIGTERM.")
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait for a new run even if the store says that the last one ended.")
]
StoreOption = Annotated[
    str, typer.Option("--trajectories-url", help="Trajectory store, as this machine reaches it.")
]


def sample_command(
    control: ControlOption,
    token: TokenOption = "",
    name: NameOption = None,
    relay: RelayOption = "",
    overrides: OverrideOption = None,
    trajectories_url: StoreOption = "",
    patience_s: PatienceOption = 600.0,
    drain_s: DrainOption = 60.0,
    wait: WaitOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary of the work as JSON.")] = False,
) -> None:
    """Run sessions for a training run elsewhere, with this machine's engine and sandboxes.

    Ends when the run ends, or at SIGTERM.
    """
    secret = read_secret(token, "--token")
    chosen = list(overrides or [])
    if relay:
        chosen.append(f'weights.read_url="{relay}"')
    options: dict[str, Any] = {"patience_s": patience_s, "drain_s": drain_s, "wait": wait}
    options["trajectories_url"] = trajectories_url
    counts, was_stopped = asyncio.run(_play(control, secret, name or socket.gethostname(), chosen, options))
    if as_json:
        print_json(counts)
    else:
        summary = ", ".join(f"{value:g} {key}" for key, value in counts.items() if value)
        error_console().print(f"done: {summary or 'no session was assigned'}", markup=False)
    if was_stopped:
        raise typer.Exit(EXIT_INTERRUPTED)


async def _play(
    control: str, token: str | None, name: str, overrides: list[str], options: dict[str, Any]
) -> tuple[dict[str, float], bool]:
    """Counts of the work done, and whether a second signal interrupted it."""
    # Heavy: torch comes with it.
    from etude.controller.clusters.client import ControlClient
    from etude.controller.clusters.joining import sample

    draining, loop = asyncio.Event(), asyncio.get_running_loop()
    async with ControlClient(control, token) as client:
        work = asyncio.ensure_future(sample(client, name, overrides, open_observer(), draining, **options))

        def on_signal() -> None:
            if draining.is_set():
                work.cancel()
            draining.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        try:
            return asdict(await work), False
        except asyncio.CancelledError:
            return {}, True
