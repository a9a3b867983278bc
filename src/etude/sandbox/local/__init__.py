"""Sandboxes on this machine: the owner's side of the fork server in `etude.sandbox.inside`."""
