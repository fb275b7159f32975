"""Text sources, tokenizers, packing to uint16 shards and a loader that resumes exactly."""
