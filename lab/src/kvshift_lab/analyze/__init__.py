"""`kvshift analyze`."""
