"""The runs on induction, which `fig01a` and `alternatives` share."""
