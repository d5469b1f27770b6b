"""`kvshift eval`."""
