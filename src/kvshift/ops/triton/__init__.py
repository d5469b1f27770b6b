"""The operator on CUDA devices, through Triton, which is imported on the first launch."""
