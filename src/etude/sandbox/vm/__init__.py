"""Sandboxes as virtual machines: QEMU, with KVM where guests boot under it."""
