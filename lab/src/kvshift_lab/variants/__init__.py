"""Model variants that experiments compare, and the construction of a model from options."""
