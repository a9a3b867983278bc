"""`etude route`: one address in front of many replicas, and commands that list and move these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from pydantic import ValidationError

from etude.cli.output import JsonOption, print_json
from etude.cli.serving_options import (
    AdminTokenOption,
    AllowedHostOption,
    CertificateOption,
    KeyOption,
)
from etude.config import RouterConfig, load_section, parse_section
from etude.config.routing import LendingLoadConfig, LendingWindowConfig
from etude.errors import InfrastructureError, UserError
from etude.kit.secrets import read_secret_file

# Options that are not given leave the file's values, or the defaults.
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Configuration file (TOML). Options take precedence.")
]
HostOption = Annotated[
    str | None,
    typer.Option(help="Address to listen on (default: 127.0.0.1). Others need --replicas-check-keys."),
]
PortOption = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one. Default: 8670.")
]
DrainOption = Annotated[
    float | None,
    typer.Option("--drain-s", min=0, help="Seconds to finish running requests after SIGTERM. Default: 60."),
]

ReplicaOption = Annotated[
    list[str] | None,
    typer.Option("--replica", help="Address of a replica: URL or URL,POOL. Repeatable."),
]
PoolOption = Annotated[str | None, typer.Option(help="Pool for requests that name none. Default: serve.")]
ArmOption = Annotated[
    list[str] | None,
    typer.Option("--arm", help="Share of the sessions for a policy version: VERSION=SHARE. Repeatable."),
]
LendOption = Annotated[
    list[str] | None,
    typer.Option(help="Daily lending between pools, such as a,b,2,22:00-06:00 (count, UTC). Repeatable."),
]
LendByLoadOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Lending by load, such as a,b,1,200-2000 (most, idle-busy tokens per replica). Repeatable."
    ),
]
SpillOption = Annotated[
    float | None,
    typer.Option(min=1, help="Overload factor at which a session moves to another replica. Default: 3."),
]
HedgeOption = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds after which a second replica is asked, too. Default: 0 (never)."),
]
ProbeOption = Annotated[
    float | None, typer.Option(min=0.05, help="Seconds between two health checks of a replica. Default: 1.")
]
AnswerTimeOption = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Seconds without an answer after which the router treats a replica as failed. Default: 600.",
    ),
]
ReplicaTokenOption = Annotated[
    Path | None,
    typer.Option(help="File with the replicas' administrator token. Needed to lend them to runs."),
]
BorrowerTokenOption = Annotated[
    Path | None, typer.Option(help="File with the token of runs that borrow. Created if missing.")
]
KeysOption = Annotated[
    bool | None,
    typer.Option(
        "--replicas-check-keys", help="State that the replicas check API keys, as a public --host needs."
    ),
]
NameArgument = Annotated[str, typer.Argument(help="Replica, as `etude route replicas` lists it.")]
RouterOption = Annotated[str, typer.Option("--router", help="Address of the router.")]
TokenOption = Annotated[
    Path | None, typer.Option("--admin-token-file", help="File with the router's administrator token.")
]
LentPoolOption = Annotated[str, typer.Option(help="Pool that the replica serves while it is lent.")]
_URL = "http://127.0.0.1:8670"
_WITHIN_S = 180.0


def route_command(
    context: typer.Context,
    config: ConfigOption = None,
    replicas: ReplicaOption = None,
    host: HostOption = None,
    port: PortOption = None,
    pool: PoolOption = None,
    arms: ArmOption = None,
    lend: LendOption = None,
    lend_by_load: LendByLoadOption = None,
    spill_factor: SpillOption = None,
    hedge_after_s: HedgeOption = None,
    probe_s: ProbeOption = None,
    answer_s: AnswerTimeOption = None,
    admin_token_file: AdminTokenOption = None,
    replica_token_file: ReplicaTokenOption = None,
    borrower_token_file: BorrowerTokenOption = None,
    replicas_check_keys: KeysOption = None,
    allowed_host: AllowedHostOption = None,
    drain_s: DrainOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Serve OpenAI's API over several replicas until SIGTERM. The replicas check API keys."""
    if context.invoked_subcommand is not None:
        return
    lending: dict[str, Any] = {}
    if lend or lend_by_load:  # in place of what the file lends
        lending["windows"] = [_window(text).model_dump() for text in lend or ()]
        lending["by_load"] = [_load(text).model_dump() for text in lend_by_load or ()]
    if lend and lend_by_load:
        raise UserError(
            "lend by schedule or by load, not both", field="--lend-by-load", fix="leave out one of them"
        )
    chosen = _changed(
        load_section(RouterConfig, config) if config is not None else RouterConfig(),
        {
            "host": host,
            "port": port,
            "pool": pool,
            "replicas_check_keys": replicas_check_keys,
            "allowed_hosts": allowed_host,
            "spill_factor": spill_factor,
            "replicas": _replicas(replicas) if replicas else None,
            "arms": _shares(arms) if arms else None,
            "limits": {"answer_s": answer_s, "hedge_after_s": hedge_after_s, "drain_s": drain_s},
            "health": {"interval_s": probe_s},
            "lending": lending,
        },
    )
    from etude.inference.router.server import Proxy, serve
    from etude.inference.router.server.app import SERVER
    from etude.sandbox.server import read_token

    token = read_token(admin_token_file, SERVER) if admin_token_file is not None else None
    borrowers = read_token(borrower_token_file, SERVER) if borrower_token_file is not None else None
    # The replicas' token belongs to the replicas, so it is never created here.
    proxy = Proxy(chosen, read_secret_file(replica_token_file, "--replica-token-file") or "")
    serve(proxy, token, borrowers, certificate, key)


route_app = typer.Typer(name="route", help="Route requests from one address to many model servers.")
route_app.callback(invoke_without_command=True)(route_command)


@route_app.command("replicas")
def replicas_command(
    router: RouterOption = _URL, token: TokenOption = None, as_json: JsonOption = False
) -> None:
    """List a router's replicas with their pools, versions and load, and the runs that borrow them."""
    rows = _send(router, token, "GET", "/router/replicas", None)["replicas"]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        _print_row(row)


@route_app.command("lend")
def lend_command(
    name: NameArgument,
    router: RouterOption = _URL,
    token: TokenOption = None,
    pool: LentPoolOption = "rollout",
) -> None:
    """Lend a replica to another pool until it is recalled."""
    _print_row(_change(router, token, name, "lend", {"pool": pool}))


@route_app.command("recall")
def recall_command(name: NameArgument, router: RouterOption = _URL, token: TokenOption = None) -> None:
    """Recall a lent replica to its own pool, and wait until it serves there.

    It stays there until it is lent again or released.
    """
    _print_row(_change(router, token, name, "recall", {}))


@route_app.command("release")
def release_command(name: NameArgument, router: RouterOption = _URL, token: TokenOption = None) -> None:
    """Let the router's lending rules decide over a replica again."""
    _print_row(_change(router, token, name, "release", {}))


def _change(router: str, token: Path | None, name: str, what: str, body: dict[str, Any]) -> dict[str, Any]:
    return _send(router, token, "POST", f"/router/replicas/{quote(name, safe=':')}/{what}", body)


def _print_row(row: dict[str, Any]) -> None:
    lent = f", lent to {row['borrower']}" if row["borrower"] else ""
    at = row["pool"] if row["pool"] == row["home"] else f"{row['pool']} (of {row['home']})"
    by_hand = ", by hand" if row["by_hand"] else ""
    version = row["version"] or "no version"
    typer.echo(f"{row['name']}: {row['state']}, {at}{by_hand}{lent}, {version}, {row['running']} running")


def _send(
    router: str, token: Path | None, method: str, path: str, body: dict[str, Any] | None
) -> dict[str, Any]:
    from etude.serving.client import Answer, NoAnswerError, SyncClient, message_of

    def refusal(answer: Answer) -> Exception:
        message = f"the router refused the request: {message_of(answer)}"
        return UserError(message, field="--router", received=answer.status_code)

    secret = read_secret_file(token, "--admin-token-file")
    try:
        with SyncClient(router, secret, within_s=_WITHIN_S, refusal=refusal) as client:
            return client.ask(method, path, json=body)
    except NoAnswerError as error:
        raise InfrastructureError(
            "the router does not answer",
            field="--router",
            received=f"{router}: {error.message}",
            fix="start the router, or correct --router",
        ) from error


def _changed(config: RouterConfig, given: Mapping[str, Any]) -> RouterConfig:
    """`config` with its values overridden by the given options. Raises ConfigError."""
    tree = config.model_dump()
    for name, value in given.items():
        if isinstance(value, dict) and name != "arms":
            tree[name] |= {k: v for k, v in value.items() if v is not None}
        elif value is not None:
            tree[name] = value
    return parse_section(RouterConfig, tree)


def _replicas(texts: list[str]) -> list[dict[str, str]]:
    return [{"url": url, "pool": pool} for url, _, pool in (text.partition(",") for text in texts)]


def _shares(arms: list[str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for arm in arms:
        version, _, share = arm.rpartition("=")
        try:
            shares[version] = float(share)
        except ValueError:
            shares[version] = -1.0
        if not version or not 0.0 <= shares[version] < float("inf"):
            raise UserError("must be VERSION=SHARE", field="--arm", received=arm, fix="write e.g. run@7=0.1")
    return shares


def _window(text: str) -> LendingWindowConfig:
    try:
        lender, borrower, count, times = text.split(",")
        start, end = times.split("-")
        return LendingWindowConfig(lender=lender, borrower=borrower, count=int(count), start=start, end=end)
    except ValueError as error:
        raise _bad_lending("--lend", text, "HH:MM-HH:MM", "serve,rollout,2,22:00-06:00", error) from error


def _load(text: str) -> LendingLoadConfig:
    try:
        lender, borrower, most, tokens = text.split(",")
        idle, busy = (float(bound) for bound in tokens.split("-"))
        return LendingLoadConfig(
            lender=lender, borrower=borrower, busy_tokens=busy, idle_tokens=idle, most=int(most)
        )
    except ValueError as error:
        raise _bad_lending("--lend-by-load", text, "IDLE-BUSY", "serve,rollout,1,200-2000", error) from error


def _bad_lending(option: str, text: str, last: str, example: str, error: ValueError) -> UserError:
    """The error for an invalid value of `option`, whose fourth part has the form `last`."""
    message = f"must be LENDER,BORROWER,COUNT,{last}"
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        message = f"{place} {problem['msg'].removeprefix('Value error, ')}".strip()
    return UserError(message, field=option, received=text, fix=f"write e.g. {example}")
