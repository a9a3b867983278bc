"""The loop: mid-training, evaluation and reinforcement learning over parts behind protocols."""
