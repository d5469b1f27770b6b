"""`kvshift check`: whether a model of transformers is right at its edges."""
