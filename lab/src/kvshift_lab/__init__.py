"""Experiments: data, training, comparison with vanilla attention. All but `kvshift check` need the extra "lab"."""
