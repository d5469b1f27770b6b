"""`kvshift check`: whether a causal language model is right at its edges."""
