"""Experiments: data, training, comparison with vanilla attention. Needs the extra "lab", except `kvshift check`."""
