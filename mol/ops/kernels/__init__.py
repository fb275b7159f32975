"""Triton kernels; import them only where a CUDA tensor arrives."""
