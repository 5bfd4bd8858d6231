"""Benchmarks: compare kernels, host time, start-up and regret with tilekern's peers; write JSON files of one format."""
