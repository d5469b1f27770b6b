"""The paper's figures and tables, each a recipe: which runs it takes, how it is drawn, what the paper claims."""
