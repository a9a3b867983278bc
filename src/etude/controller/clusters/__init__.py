"""Sessions in other clusters: who is given which, what comes back, and the cluster's own side of it."""
