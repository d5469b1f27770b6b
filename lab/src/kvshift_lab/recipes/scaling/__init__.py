"""The runs of models of several sizes that `fig05` and `fig06` share."""
