"""Studies: arms x seeds, with grids of learning rates -> runs -> records -> claims -> report."""
