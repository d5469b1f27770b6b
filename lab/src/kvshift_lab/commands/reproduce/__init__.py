"""`kvshift reproduce`: the figures and tables of the paper, run again."""
