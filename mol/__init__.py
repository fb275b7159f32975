"""Reproduction and audit of *Mixture of Layers with Hybrid Attention* (arXiv 2605.09516)."""

__version__ = "0.1.0"
