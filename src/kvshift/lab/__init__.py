"""Experiments: data, training, comparison with vanilla attention. Needs `pip install 'kvshift[lab]'`."""
