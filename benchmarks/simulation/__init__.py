"""The code that routes, places and trains, driven by discrete events in virtual time."""
