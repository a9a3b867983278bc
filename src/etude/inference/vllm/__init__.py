"""vLLM behind our own protocols: the engine for large models on GPUs (`engine.backend = "vllm"`)."""

from etude.inference.vllm.opening import check_vllm, make_vllm_sampler
from etude.inference.vllm.probes import Probe, check_probe
from etude.inference.vllm.publishing import FetchedSnapshots, ModelSnapshots
from etude.inference.vllm.replica import Replica, UpdateTimes
from etude.inference.vllm.sampler import VllmSampler
from etude.inference.vllm.servers import ExternalServer, ManagedServer, VllmServer
from etude.inference.vllm.snapshots import SnapshotDirectory, open_snapshot

__all__ = [
    "ExternalServer",
    "FetchedSnapshots",
    "ManagedServer",
    "ModelSnapshots",
    "Probe",
    "Replica",
    "SnapshotDirectory",
    "UpdateTimes",
    "VllmSampler",
    "VllmServer",
    "check_probe",
    "check_vllm",
    "make_vllm_sampler",
    "open_snapshot",
]
