"""The parts of a run in processes of their own, and what stands for them in the run's process."""
