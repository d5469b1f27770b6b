"""What the paper leaves open of its induction task, both ways: does the comparison of Figure 1a depend on it?"""
