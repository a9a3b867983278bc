"""Compiles every kernel for an H100, which needs none: PTX and machine code come out of Triton alone.

    python compile_for_gpu.py        JSON on standard output: bytes of shared memory, per kernel and shape

Run as a program, without TRITON_INTERPRET: the interpreter takes the place of what is compiled.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from etude.model.kernels.gpu import experts, paged_attention, pointwise

HOPPER = GPUTarget("cuda", 90, 32)
HALF, SINGLE, INT, LONG = "*bf16", "*fp32", "*i32", "*i64"

GROUPED = {"KV_HEADS": 8, "GROUP": 4, "TILE_HEADS": 4, "MAIN": 128, "TAIL": 0, "VALUE": 128}
LATENT = {"KV_HEADS": 1, "GROUP": 128, "TILE_HEADS": 16, "MAIN": 512, "TAIL": 64, "VALUE": 512}
MIXTURE = {"TOP_K": 8, "SLOTS": 8, "WIDTH": 2048, "INNER": 768, "BLOCK": 64, "DEPTH": 64}
ATTEND = {"query": HALF, "keys": HALF, "values": HALF, "tables": INT, "positions": LONG} | {
    "first_row": INT,
    "num_rows": INT,
    "sequence": INT,
    "partial": SINGLE,
    "statistics": SINGLE,
    "scale": "fp32",
}
STORE = dict.fromkeys(("key", "value", "keys", "values"), HALF) | {
    "tables": INT,
    "sequence": INT,
    "positions": LONG,
}
PAGES = {"PAGE": paged_attention.PAGE_TOKENS}
BLOCKS = {**PAGES, "BLOCK": 64, "SPLIT": 1024}

CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]] = {
    "decode": (
        paged_attention._attend,
        ATTEND,
        {**GROUPED, **BLOCKS, "TILE": 16, "VALUE_IN_KEY": False},
        {"num_stages": 3},
    ),
    "prefill": (
        paged_attention._attend,
        ATTEND,
        {**GROUPED, **BLOCKS, "TILE": 64, "VALUE_IN_KEY": False},
        {"num_stages": 3},
    ),
    "prefill in float32 from a halved cache": (
        paged_attention._attend,
        {**ATTEND, "query": SINGLE},
        {**GROUPED, **BLOCKS, "TILE": 64, "VALUE_IN_KEY": False},
        {"num_stages": 3},
    ),
    "latent": (
        paged_attention._attend,
        ATTEND,
        {**LATENT, **BLOCKS, "TILE": 16, "VALUE_IN_KEY": True},
        {"num_stages": 2, "num_warps": 8},
    ),
    "join": (
        paged_attention._join,
        {"partial": SINGLE, "statistics": SINGLE, "out": HALF},
        {"HEADS": 32, "VALUE": 128},
        {},
    ),
    "store": (
        paged_attention._store,
        STORE,
        {"HEADS": 8, "KEY": 128, "VALUE": 128, "KEY_BLOCK": 128, "VALUE_BLOCK": 128}
        | {"HAS_VALUES": True, **PAGES},
        {},
    ),
    "store latent": (
        paged_attention._store,
        STORE,
        {"HEADS": 1, "KEY": 576, "VALUE": 1, "KEY_BLOCK": 1024, "VALUE_BLOCK": 1}
        | {"HAS_VALUES": False, **PAGES},
        {},
    ),
    "gate and up": (
        experts._gate_up,
        {"x": HALF, "weight": HALF, "chosen": LONG, "gated": HALF},
        {**MIXTURE, "TILE": 64},
        {},
    ),
    "down": (
        experts._down,
        {"gated": HALF, "weight": HALF, "chosen": LONG, "mixed": SINGLE},
        {**MIXTURE, "TILE": 64},
        {},
    ),
    "combine": (
        experts._combine,
        {"mixed": SINGLE, "weights": SINGLE, "out": HALF},
        {"TOP_K": 8, "WIDTH": 2048, "BLOCK": 1024},
        {},
    ),
    "silu gate": (
        pointwise._silu_gate,
        {"gate": HALF, "up": HALF, "out": HALF},
        {"BLOCK": 1024},
        {},
    ),
    "rotate": (
        pointwise._rotate,
        {"x": HALF, "cosine": HALF, "signed_sine": HALF, "out": HALF},
        {"HEADS": 40, "WIDTH": 128, "BLOCK": 128},
        {},
    ),
}


def compile_case(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> int:
    """Bytes of shared memory of one program; arguments that have no type here are 32-bit integers."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    compiled = triton.compile(source, target=HOPPER, options=options)
    assert compiled.asm["cubin"]
    return int(compiled.metadata.shared)


if __name__ == "__main__":
    print(json.dumps({name: compile_case(*case) for name, case in CASES.items()}))
