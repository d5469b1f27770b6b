"""The training loop on transformers' Trainer: text (`kvshift train`) and tasks."""
