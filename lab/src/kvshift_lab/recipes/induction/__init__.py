"""The runs on induction that `fig01a` and `alternatives` share."""
