"""`etude relay`: a caching weight store for one cluster, which fetches each byte once over the long link."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.serving_options import (
    AllowedHostOption,
    CertificateOption,
    DrainOption,
    HostOption,
    KeyOption,
    PortOption,
)
from etude.kit.secrets import read_secret

_GIB = 1 << 30

StoreArgument = Annotated[
    str, typer.Argument(help="Weight store: a directory, an fsspec URL or another relay.")
]
CacheOption = Annotated[Path, typer.Option("--cache", help="Directory in which downloaded files are cached.")]
CacheSizeOption = Annotated[
    float, typer.Option("--cache-gib", min=0.01, help="Size limit of the cache in GiB.")
]
TokenOption = Annotated[
    str,
    typer.Option("--token", help="Source of the token that readers must send: file:PATH or env:NAME."),
]
StoreTokenOption = Annotated[
    str, typer.Option("--store-token", help="Source of the token to send to another relay.")
]


def relay_command(
    store: StoreArgument,
    cache: CacheOption,
    cache_gib: CacheSizeOption = 1024.0,
    host: HostOption = "127.0.0.1",
    allowed_host: AllowedHostOption = None,
    port: PortOption = 8670,
    token: TokenOption = "",
    store_token: StoreTokenOption = "",
    drain_s: DrainOption = 5.0,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Serve a weight store to the engines of one cluster, until SIGTERM."""
    # Heavy: FastAPI comes with them, and torch.
    from etude.serving.listening import check_token, open_listeners
    from etude.serving.process import Draining, run_server
    from etude.weights.folders import open_folder
    from etude.weights.relay import Relay
    from etude.weights.server import build_app

    secret = read_secret(token, "--token")
    check_token(host, secret is not None)
    folder = open_folder(store, read_secret(store_token, "--store-token"))
    relay = Relay(folder, cache, int(cache_gib * _GIB))

    draining = Draining("fetches", drain_s, None, lambda: relay.is_fetching)
    serving = run_server(
        build_app(relay, secret),
        "weight relay",
        draining,
        open_listeners(host, port),
        note=f"of {store}" + ("" if secret else "; no token: for this machine only"),
        allowed_hosts=(host, *(allowed_host or ())),
        certificate=certificate,
        key=key,
    )
    asyncio.run(serving)
