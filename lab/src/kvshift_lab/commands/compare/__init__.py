"""`kvshift compare`: training and comparison of model variants."""
