"""vLLM as a Sampler and WeightSink: the engine for large models on GPUs (`engine.backend = "vllm"`)."""

from etude.inference.vllm.opening import check_vllm as check_vllm
from etude.inference.vllm.opening import make_vllm_sampler as make_vllm_sampler
from etude.inference.vllm.probes import Probe as Probe
from etude.inference.vllm.publishing import FetchedSnapshots as FetchedSnapshots
from etude.inference.vllm.publishing import ModelSnapshots as ModelSnapshots
from etude.inference.vllm.replica import Replica as Replica
from etude.inference.vllm.sampler import VllmSampler as VllmSampler
from etude.inference.vllm.servers import ExternalServer as ExternalServer
from etude.inference.vllm.servers import ManagedServer as ManagedServer
from etude.inference.vllm.snapshots import SnapshotDirectory as SnapshotDirectory
from etude.inference.vllm.snapshots import open_snapshot as open_snapshot
