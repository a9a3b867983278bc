"""`etude route replicas|lend|recall|release`: lists and moves the replicas of a running router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from etude.cli.output import JsonOption, print_json
from etude.errors import InfrastructureError, UserError
from etude.kit.secrets import read_secret_file

NameArgument = Annotated[str, typer.Argument(help="Replica, as `etude route replicas` lists it.")]
RouterOption = Annotated[str, typer.Option("--router", help="Address of the router.")]
TokenOption = Annotated[
    Path | None, typer.Option("--admin-token-file", help="File with the router's administrator token.")
]
PoolOption = Annotated[str, typer.Option(help="Pool that the replica serves while it is lent.")]
_URL = "http://127.0.0.1:8670"
_WITHIN_S = 180.0


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


def lend_command(
    name: NameArgument, router: RouterOption = _URL, token: TokenOption = None, pool: PoolOption = "rollout"
) -> None:
    """Lend a replica to another pool until it is recalled."""
    _print_row(_change(router, token, name, "lend", {"pool": pool}))


def recall_command(name: NameArgument, router: RouterOption = _URL, token: TokenOption = None) -> None:
    """Recall a lent replica to its own pool, and wait until it serves there.

    It stays there until it is lent again or released.
    """
    _print_row(_change(router, token, name, "recall", {}))


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
