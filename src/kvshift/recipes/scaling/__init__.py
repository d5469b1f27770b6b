"""The runs of models of several sizes, which `fig05` and `fig06` share."""
