"""Many hosts as one backend: placement, death, forks, and a list of servers that may change."""
