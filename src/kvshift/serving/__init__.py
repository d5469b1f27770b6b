"""Level 4: `kvshift serve`, which depends on the run folders of the lab and on the vLLM plugin."""
