"""The cache under load, under faults and at scale: harnesses that the tests and `python -m benchmarks` share."""
