"""Statistics, tables, plots and reports from result files. Nothing here trains or loads a model."""
