"""Level 5: what `kvshift bench` measures: operator, layer and models beside their baselines, in one process and run."""
