"""What holds for every test."""

import os

from hypothesis import HealthCheck, settings

# Before torch is imported: two spinning compute threads on two busy cores are far slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Ray is imported, whichever test does so first: it listens on loopback alone.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# A property holds however long a busy machine takes over one example.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
