"""Options that the commands which serve something share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HostOption = Annotated[str, typer.Option(help="Address to bind to; others than loopback need keys or TLS.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")]
DrainOption = Annotated[
    float, typer.Option("--drain-s", min=0, help="How long what is under way may go on after SIGTERM.")
]
CertificateOption = Annotated[Path | None, typer.Option(help="PEM file.")]
KeyOption = Annotated[Path | None, typer.Option(help="PEM file.")]
AdminTokenOption = Annotated[
    Path | None, typer.Option(help="File with the administrator's token; made if there is none.")
]

# Of commands with a model:
GrammarOption = Annotated[str, typer.Option(help="auto, hermes or xml: how the model writes calls.")]
LineageOption = Annotated[str | None, typer.Option(help="Name of the weights' line; else the model's.")]
StepOption = Annotated[int, typer.Option(min=0, help="Optimiser steps that the weights have had.")]
KernelsOption = Annotated[str, typer.Option(help="auto, eager, native or gpu.")]
CacheDtypeOption = Annotated[
    str,
    typer.Option(help="Number format of keys and values: auto (as the model computes), float32 or bfloat16."),
]
WeightDtypeOption = Annotated[
    str, typer.Option(help="Of native kernels' copy of the matrices: auto, float32 or bfloat16.")
]
NumSessionsOption = Annotated[int, typer.Option(min=1, help="Answers that are computed at once.")]
CacheOption = Annotated[
    int, typer.Option(min=0, help="Memory for keys and values; 0: half of what is free, at most.")
]
SpeculativeOption = Annotated[
    int, typer.Option(min=0, help="Tokens guessed ahead and verified at once; 0: none.")
]
DraftsOption = Annotated[
    str,
    typer.Option(help="What guesses: ngram, from the session, or mtp, by the model's layers."),
]
