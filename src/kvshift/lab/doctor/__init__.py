"""`kvshift doctor`: what this installation would do, and whether that is right."""
