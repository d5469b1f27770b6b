"""`kvshift compare`."""
