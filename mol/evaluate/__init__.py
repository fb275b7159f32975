"""Perplexity with typed units, and zero-shot scores through lm-eval."""
