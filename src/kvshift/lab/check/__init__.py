"""`kvshift check`: tests a model of transformers at document boundaries, padding and caches."""
