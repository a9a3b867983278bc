"""ctypes mirrors of the structures in `forward.h`, `sampling.h` and `drafting.h`, field by field."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from etude.model.kernels.native.matrices import NativeMatrix


def _fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Consecutive fields of one type."""
    return [(name, kind) for name in names.split()]


def _counts(names: str) -> list[tuple[str, type[Any]]]:
    return _fields(ctypes.c_int64, names)


def _pointers(names: str) -> list[tuple[str, type[Any]]]:
    return _fields(ctypes.c_void_p, names)


class Model(ctypes.Structure):
    """`Model` of forward.h."""

    _fields_: ClassVar = [
        *_counts(
            "width heads kv_heads dim value_dim layers experts top_k expert_size inner normalise "
            "latent query_rank nope rope head_value_dim sigmoid groups top_groups shared_inner "
            "drafting adapter_rank"
        ),
        *_fields(ctypes.c_float, "eps latent_eps query_scale gate_scale"),
        *_pointers("embedding cosine signed_sine final_norm"),
    ]


class Layer(ctypes.Structure):
    """`Layer` of forward.h."""

    _fields_: ClassVar = [
        *_pointers("attention_norm query_norm key_norm experts_norm qkv_bias score_bias"),
        *_fields(NativeMatrix, "qkv query_up out router"),
        *_pointers("key_up value_up gate_up down shared_gate_up shared_down keys values"),
        *_counts("route_layer"),
        *_pointers("factors"),
    ]


class Factors(ctypes.Structure):
    """`Factors` of common.h."""

    _fields_: ClassVar = [
        *_counts("count"),
        *_pointers("down up"),
    ]


class Entrance(ctypes.Structure):
    """`Entrance` of forward.h."""

    _fields_: ClassVar = [
        *_pointers("token_norm hidden_norm final_norm"),
        *_fields(NativeMatrix, "projection"),
    ]


class Step(ctypes.Structure):
    """`Step` of forward.h."""

    _fields_: ClassVar = [
        *_counts("rows max_pages route_layers route_bytes"),
        *_pointers("tokens sequences positions tables hidden routes adapters"),
    ]


class Draw(ctypes.Structure):
    """`Draw` of sampling.h."""

    _fields_: ClassVar = [
        *_counts("rows vocabulary"),
        *_pointers("hidden temperatures top_p min_p top_k draws logits tokens logprobs raw_logprobs"),
    ]


class Lookup(ctypes.Structure):
    """`Lookup` of drafting.h."""

    _fields_: ClassVar = [
        *_counts("longest shortest"),
    ]


class DraftLayers(ctypes.Structure):
    """`DraftLayers` of drafting.h."""

    _fields_: ClassVar = [
        *_pointers("model layers entrances"),
        *_counts("depth"),
        *_pointers("carried carried_counts carried_ends"),
    ]


class DraftRun(ctypes.Structure):
    """`DraftRun` of drafting.h."""

    _fields_: ClassVar = [
        *_counts("count steps positions most_drafts max_tokens"),
        *_pointers(
            "lines tokens logprobs lengths limits rooms wanted ready drafted stood first_stops stops noise"
        ),
        *_counts("noise_places"),
        *_pointers("temperatures top_p min_p top_k tables"),
        *_counts("max_pages"),
        *_pointers("routes"),
        *_counts("route_layers route_bytes vocabulary"),
        *_pointers("lookup layers adapters"),
    ]
