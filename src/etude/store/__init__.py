"""Durable storage of trajectories: the log, blob stores for large arrays, and import and export of ATIF."""

from etude.store.atif import ATIF_VERSION as ATIF_VERSION
from etude.store.atif import trajectory_to_atif as trajectory_to_atif
from etude.store.atif_reading import parse_atif as parse_atif
from etude.store.atif_reading import trajectory_from_atif as trajectory_from_atif
from etude.store.blobs import BlobStore as BlobStore
from etude.store.blobs import FileBlobs as FileBlobs
from etude.store.blobs import MemoryBlobs as MemoryBlobs
from etude.store.trajectories import TrajectoryLog as TrajectoryLog
