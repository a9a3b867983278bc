"""Fakes of external services, engines and programs for tests and benchmarks, which can fail on purpose."""
