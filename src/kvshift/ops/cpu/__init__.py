"""The operator on x86-64 processors, through a compiled kernel."""
