"""Sandboxes that are virtual machines: QEMU, with KVM where guests boot under it."""
