"""Does KV shift lower the loss on real text, at 2, 4 and 8 layers? Settings, claims and margin, before any run."""
