"""Episodes of an agent on a task in a sandbox, and grading that an agent cannot manipulate."""
