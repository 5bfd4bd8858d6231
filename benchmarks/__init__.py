"""Benchmarks: kernels, host time, start-up and regret beside tilekern's peers, kept as JSON in one form."""
