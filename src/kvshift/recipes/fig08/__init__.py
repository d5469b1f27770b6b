"""Figure 8: hops from letter to letter, and how many of them models with two to six layers can follow."""
