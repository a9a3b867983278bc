"""Sandboxes in Firecracker microVMs, for hosts with KVM."""
