"""`kvshift doctor`: describes this installation and tests the operator."""
