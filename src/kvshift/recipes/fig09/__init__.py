"""Figure 9: learning a table of triples from memory, where KV shift makes no difference."""
