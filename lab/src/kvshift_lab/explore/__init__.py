"""`kvshift explore`."""
