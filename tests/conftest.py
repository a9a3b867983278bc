"""What holds for every test."""

import os

# Before torch is imported: two spinning compute threads on two busy cores are far slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Ray is imported, whichever test does so first: it listens on loopback alone.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
