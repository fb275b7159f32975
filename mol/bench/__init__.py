"""Benchmarks of E08 and E13: each program writes a record like any run."""
