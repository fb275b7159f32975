"""Numerical kernels of the models, each with a plain reference beside its fast path."""
