"""Sessions played by other clusters: leases, results, the control API, and the cluster's own side."""
