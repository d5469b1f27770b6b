"""Figure 1b: at width 8, one layer with KV shift is ahead of two layers without."""
