"""Figure 1a: one layer with KV shift learns induction, and sooner than two layers without."""
