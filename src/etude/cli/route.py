"""`etude route`: one address in front of many replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.serving_options import (
    AdminTokenOption,
    CertificateOption,
    DrainOption,
    HostOption,
    KeyOption,
    PortOption,
)
from etude.errors import ConfigError, UserError

if TYPE_CHECKING:
    from etude.inference.router.pools import LendingByLoad, LendingWindow


ReplicaOption = Annotated[
    list[str] | None,
    typer.Option("--replica", help="Address of a replica, URL or URL,POOL; repeatable. More may join later."),
]
PoolOption = Annotated[str, typer.Option(help="Pool of requests that name none.")]
ArmOption = Annotated[
    list[str] | None,
    typer.Option("--arm", help="VERSION=SHARE of the sessions, for A/B tests; repeatable."),
]
LendOption = Annotated[
    list[str] | None,
    typer.Option(help="LENDER,BORROWER,COUNT,HH:MM-HH:MM (UTC): replicas lent every day; repeatable."),
]
LendByLoadOption = Annotated[
    list[str] | None,
    typer.Option(help="LENDER,BORROWER,MOST,IDLE-BUSY (outstanding tokens a replica); repeatable."),
]
SpillOption = Annotated[float, typer.Option(min=1, help="Times the work that moves a session.")]
HedgeOption = Annotated[
    float | None, typer.Option(min=0.001, help="Ask a second replica after it; never if left out.")
]
ProbeOption = Annotated[float, typer.Option(min=0.05, help="Between two health checks of a replica.")]
AnswerTimeOption = Annotated[float, typer.Option(min=1, help="A replica silent so long has lost it.")]
KeysOption = Annotated[
    bool, typer.Option("--replicas-check-keys", help="They do; needed for addresses that others reach.")
]


def route_command(
    replicas: ReplicaOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8670,
    pool: PoolOption = "serve",
    arms: ArmOption = None,
    lend: LendOption = None,
    lend_by_load: LendByLoadOption = None,
    spill_factor: SpillOption = 3.0,
    hedge_after_s: HedgeOption = None,
    probe_s: ProbeOption = 1.0,
    answer_s: AnswerTimeOption = 600.0,
    admin_token_file: AdminTokenOption = None,
    replicas_check_keys: KeysOption = False,
    drain_s: DrainOption = 60.0,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Serve OpenAI's API over replicas, until SIGTERM. Keys are checked by the replicas."""
    from etude.inference.router import HealthConfig, RoutingConfig
    from etude.inference.router.pools import Lender
    from etude.inference.router.server import Proxy, ProxyConfig, ReplicaAddress, serve
    from etude.inference.router.server.process import SERVER
    from etude.sandbox.server import read_token

    addresses = [
        ReplicaAddress(url, named or None) for url, _, named in (r.partition(",") for r in replicas or [])
    ]
    proxy = Proxy(
        ProxyConfig(answer_s=answer_s, hedge_after_s=hedge_after_s, pool=pool),
        RoutingConfig(spill_factor=spill_factor),
        HealthConfig(interval_s=probe_s),
        _shares(arms or []),
        Lender([_window(text) for text in lend or []], [_by_load(text) for text in lend_by_load or []]),
    )
    token = read_token(admin_token_file, SERVER) if admin_token_file is not None else None
    serve(
        proxy,
        addresses,
        host=host,
        port=port,
        admin_token=token,
        replicas_check_keys=replicas_check_keys,
        drain_s=drain_s,
        certificate=certificate,
        key=key,
    )


def _shares(arms: list[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for arm in arms:
        version, _, share = arm.rpartition("=")
        try:
            shares[version] = float(share)
        except ValueError:
            shares[version] = -1.0
        if not version or not 0.0 <= shares[version] < float("inf"):
            raise UserError("must be VERSION=SHARE", field="--arm", received=arm, fix="such as run@7=0.1")
    return shares


def _window(text: str) -> LendingWindow:
    from etude.inference.router.pools import LendingWindow

    try:
        lender, borrower, count, times = text.split(",")
        start, end = times.split("-")
        return LendingWindow(lender, borrower, int(count), _seconds(start), _seconds(end))
    except ValueError as error:
        raise UserError(
            "must be LENDER,BORROWER,COUNT,HH:MM-HH:MM",
            field="--lend",
            received=text,
            fix="such as serve,rollout,2,22:00-06:00",
        ) from error
    except ConfigError as error:
        raise UserError(error.message, field="--lend", received=text, fix=error.fix) from error


def _by_load(text: str) -> LendingByLoad:
    from etude.inference.router.pools import LendingByLoad

    try:
        lender, borrower, most, tokens = text.split(",")
        idle, busy = tokens.split("-")
        return LendingByLoad(lender, borrower, float(busy), float(idle), int(most))
    except ValueError as error:
        raise UserError(
            "must be LENDER,BORROWER,MOST,IDLE-BUSY",
            field="--lend-by-load",
            received=text,
            fix="such as serve,rollout,1,200-2000",
        ) from error
    except ConfigError as error:
        raise UserError(
            f"{error.field} {error.message}", field="--lend-by-load", received=text, fix=error.fix
        ) from error


def _seconds(text: str) -> float:
    hours, minutes = text.split(":")
    return 3600.0 * int(hours) + 60.0 * int(minutes)
