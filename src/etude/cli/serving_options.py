"""Options that the serving commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

HostOption = Annotated[str, typer.Option(help="Address to listen on. Public ones need keys or TLS.")]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="Another host name by which clients reach the server. Repeatable."),
]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]
DrainOption = Annotated[
    float, typer.Option("--drain-s", min=0, help="Seconds to finish running requests after SIGTERM.")
]
CertificateOption = Annotated[Path | None, typer.Option(help="TLS certificate (PEM file).")]
KeyOption = Annotated[Path | None, typer.Option(help="Key of the certificate (PEM file).")]
AdminTokenOption = Annotated[
    Path | None, typer.Option(help="File with the administrator's token. It is created if it does not exist.")
]

# Of commands with a model:
NumberFormat = Literal["auto", "float32", "bfloat16"]
LineageOption = Annotated[str | None, typer.Option(help="Lineage of the weights. Default: the model's name.")]
StepOption = Annotated[int, typer.Option(min=0, help="Step of the weights, part of their version.")]
KernelsOption = Annotated[
    Literal["auto", "eager", "native", "gpu"], typer.Option(help="Kernels of the engine.")
]
CacheDtypeOption = Annotated[
    NumberFormat, typer.Option(help="Number format of keys and values; auto: as the model computes.")
]
WeightDtypeOption = Annotated[NumberFormat, typer.Option(help="Number format of native kernels' matrices.")]
