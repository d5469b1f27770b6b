"""Training runs on text (`kvshift train`) and on synthetic tasks, with transformers' Trainer."""
