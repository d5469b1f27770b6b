"""`kvshift retrofit`."""
