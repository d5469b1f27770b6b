"""Table 5 and Appendix F: which way the coefficients of the KV heads lean, at the end and over training."""
