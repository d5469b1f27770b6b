"""Does KV shift help a model that has learned without it? Coefficients, LoRA and both, trained for a few minutes."""
