"""`kvshift generate`."""
