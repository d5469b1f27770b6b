"""The operator on CUDA devices, through Triton, which is imported at the first launch."""
