"""Does the gain survive depth? Real text at several depths: what the reviewers of the paper asked."""
