"""What an experiment compares: from options to a model."""
