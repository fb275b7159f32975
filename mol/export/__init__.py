"""A trained model of this suite in the form that transformers, lm-eval and others load.

Importing this package registers `MoLConfig` and `MoLForCausalLM` with transformers' Auto classes.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from mol.export.cache import MoLCache
from mol.export.configuration_mol import MoLConfig
from mol.export.modeling_mol import MoLForCausalLM

__all__ = ["MoLCache", "MoLConfig", "MoLForCausalLM"]

AutoConfig.register(MoLConfig.model_type, MoLConfig)
AutoModelForCausalLM.register(MoLConfig, MoLForCausalLM)
