"""Reproduction and audit of *Mixture of Layers with Hybrid Attention* (arXiv 2605.09516)."""

__version__ = "0.1.0"

__all__ = ["MoLConfig", "MoLForCausalLM"]


def __getattr__(name: str):
    """The transformers classes, imported at first use: they take seconds."""
    if name in __all__:
        import mol.export

        return getattr(mol.export, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
