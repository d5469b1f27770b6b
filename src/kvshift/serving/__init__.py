"""Level 4: `kvshift serve`, which knows both the run folders of the lab and vLLM's plugin."""
