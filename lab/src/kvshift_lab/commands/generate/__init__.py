"""`kvshift generate`: generating text with a model."""
