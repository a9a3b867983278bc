"""Checkpoints: written atomically while training continues, and verified when they are read."""

from etude.training.checkpoints.files import find_flaws as find_flaws
from etude.training.checkpoints.history import find_resumable as find_resumable
from etude.training.checkpoints.keeper import CheckpointKeeper as CheckpointKeeper
from etude.training.checkpoints.keeper import FollowerWriter as FollowerWriter
from etude.training.checkpoints.saving import WriteCheckpoint as WriteCheckpoint
from etude.training.checkpoints.saving import load_checkpoint as load_checkpoint
from etude.training.checkpoints.saving import load_stored as load_stored
from etude.training.checkpoints.saving import read_state as read_state
from etude.training.checkpoints.saving import save_checkpoint as save_checkpoint
from etude.training.checkpoints.shards import ModelShards as ModelShards
from etude.training.checkpoints.shards import without_model as without_model
