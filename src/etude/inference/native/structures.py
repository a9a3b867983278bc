"""The structures that `forward.h`, `sampling.h`, `drafting.h` and `decode.c` declare, field by field."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from etude.model.kernels.native.matrices import NativeMatrix


class Model(ctypes.Structure):
    """`Model` of forward.h."""

    _fields_: ClassVar = [
        ("width", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("expert_size", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("normalise", ctypes.c_int64),
        ("latent", ctypes.c_int64),
        ("query_rank", ctypes.c_int64),
        ("nope", ctypes.c_int64),
        ("rope", ctypes.c_int64),
        ("head_value_dim", ctypes.c_int64),
        ("sigmoid", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("top_groups", ctypes.c_int64),
        ("shared_inner", ctypes.c_int64),
        ("drafting", ctypes.c_int64),
        ("adapter_rank", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("latent_eps", ctypes.c_float),
        ("query_scale", ctypes.c_float),
        ("gate_scale", ctypes.c_float),
        ("embedding", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("signed_sine", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
    ]


class Layer(ctypes.Structure):
    """`Layer` of forward.h."""

    _fields_: ClassVar = [
        ("attention_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("experts_norm", ctypes.c_void_p),
        ("qkv_bias", ctypes.c_void_p),
        ("score_bias", ctypes.c_void_p),
        ("qkv", NativeMatrix),
        ("query_up", NativeMatrix),
        ("out", NativeMatrix),
        ("router", NativeMatrix),
        ("key_up", ctypes.c_void_p),
        ("value_up", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("shared_gate_up", ctypes.c_void_p),
        ("shared_down", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("route_layer", ctypes.c_int64),
        ("factors", ctypes.c_void_p),
    ]


class Factors(ctypes.Structure):
    """`Factors` of common.h."""

    _fields_: ClassVar = [("count", ctypes.c_int64), ("down", ctypes.c_void_p), ("up", ctypes.c_void_p)]


class Entrance(ctypes.Structure):
    """`Entrance` of forward.h."""

    _fields_: ClassVar = [
        ("token_norm", ctypes.c_void_p),
        ("hidden_norm", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("projection", NativeMatrix),
    ]


class Step(ctypes.Structure):
    """`Step` of forward.h."""

    _fields_: ClassVar = [
        ("rows", ctypes.c_int64),
        ("max_pages", ctypes.c_int64),
        ("route_layers", ctypes.c_int64),
        ("route_bytes", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("sequences", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("routes", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
    ]


class Draw(ctypes.Structure):
    """`Draw` of sampling.h."""

    _fields_: ClassVar = [
        ("rows", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("draws", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("raw_logprobs", ctypes.c_void_p),
    ]


class DecodeRun(ctypes.Structure):
    """`DecodeRun` of decode.c."""

    _fields_: ClassVar = [
        ("steps", ctypes.c_int64),
        ("first_stops", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
    ]


class Lookup(ctypes.Structure):
    """`Lookup` of drafting.h."""

    _fields_: ClassVar = [("longest", ctypes.c_int64), ("shortest", ctypes.c_int64)]


class DraftLayers(ctypes.Structure):
    """`DraftLayers` of drafting.h."""

    _fields_: ClassVar = [
        ("model", ctypes.c_void_p),
        ("layers", ctypes.c_void_p),
        ("entrances", ctypes.c_void_p),
        ("depth", ctypes.c_int64),
        ("carried", ctypes.c_void_p),
        ("carried_counts", ctypes.c_void_p),
        ("carried_ends", ctypes.c_void_p),
    ]


class DraftRun(ctypes.Structure):
    """`DraftRun` of drafting.h."""

    _fields_: ClassVar = [
        ("count", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("most_drafts", ctypes.c_int64),
        ("max_tokens", ctypes.c_int64),
        ("lines", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("limits", ctypes.c_void_p),
        ("rooms", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("ready", ctypes.c_void_p),
        ("drafted", ctypes.c_void_p),
        ("stood", ctypes.c_void_p),
        ("first_stops", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
        ("noise", ctypes.c_void_p),
        ("noise_places", ctypes.c_int64),
        ("temperatures", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("max_pages", ctypes.c_int64),
        ("routes", ctypes.c_void_p),
        ("route_layers", ctypes.c_int64),
        ("route_bytes", ctypes.c_int64),
        ("vocabulary", ctypes.c_int64),
        ("lookup", ctypes.c_void_p),
        ("layers", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
    ]
