"""Small mechanisms that every part needs, each in one place. It imports the standard library and the errors.

`retry`: trying again with pauses that grow. `tasks`: work that goes on beside its caller.
"""
