"""The colors of every figure, told apart by the colour-blind (Okabe and Ito)."""

__all__ = ["BLUE", "COLORS", "GREEN", "PURPLE", "VERMILLION"]

VERMILLION, BLUE, GREEN, PURPLE, ORANGE, SKY_BLUE = "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"

COLORS = (VERMILLION, BLUE, GREEN, PURPLE, ORANGE, SKY_BLUE)
"""All of them, in the order in which models are given theirs."""
