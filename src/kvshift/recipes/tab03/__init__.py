"""Table 3: the logits behind Theorem 3.4, as printed and as derived, beside those of the model itself."""
