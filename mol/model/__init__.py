"""The paper's models. Import `mol.model.config` for configurations without importing torch."""
