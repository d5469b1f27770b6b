"""The paper's figures and tables as recipes: the runs that each needs, its plot, and the paper's claims."""
