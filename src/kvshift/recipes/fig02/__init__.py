"""Figure 2: the loss of Theorem 3.4 over a square of coefficients, and where descent leads, there and beyond it."""
