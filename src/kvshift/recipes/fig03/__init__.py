"""Figure 3 and Table 2: the models of 2.9B and 19B, whose sharded step can be tried without their memory."""
