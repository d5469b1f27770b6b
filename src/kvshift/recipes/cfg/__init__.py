"""The rebuttal's control: on sentences of a context-free grammar, KV shift does not improve what a model writes."""
