"""What has been collected is not lost: the trajectory log, arrays kept beside it, and ATIF in and out."""

from etude.store.atif import ATIF_VERSION, trajectory_to_atif
from etude.store.atif_reading import parse_atif, trajectory_from_atif
from etude.store.blobs import BlobStore, FileBlobs, MemoryBlobs
from etude.store.trajectories import TrajectoryLog, TrajectorySummary

__all__ = [
    "ATIF_VERSION",
    "BlobStore",
    "FileBlobs",
    "MemoryBlobs",
    "TrajectoryLog",
    "TrajectorySummary",
    "parse_atif",
    "trajectory_from_atif",
    "trajectory_to_atif",
]
