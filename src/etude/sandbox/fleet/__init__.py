"""Many hosts as one backend: placement, death, draining, and a simulation of the same scheduler."""
