"""Reads result files: statistics, tables, plots, reports. Nothing here trains or loads a model."""
