"""What stands in tests and benchmarks for services, engines and programs by others, and fails on purpose."""
