"""`kvshift export`."""
