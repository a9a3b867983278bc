"""The parts of a run in processes of their own, and their clients in the run's process."""
