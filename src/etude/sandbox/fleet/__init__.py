"""Many hosts as one backend: placement, host failure, forks, and a server list that may change at runtime."""
