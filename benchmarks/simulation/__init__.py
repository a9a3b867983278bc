"""Discrete-event simulations: the real router, scheduler and RL loop in virtual time."""
