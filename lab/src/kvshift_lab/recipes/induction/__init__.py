"""The runs on induction of `fig01a`."""
