"""Level 5: the measurements of `kvshift bench`: operator, layer and models, compared with baselines in one process."""
