"""`kvshift plan`."""
