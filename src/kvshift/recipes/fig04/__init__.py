"""Figure 4: vanilla and KV shift over seeds and learning rates, and which of them diverge."""
