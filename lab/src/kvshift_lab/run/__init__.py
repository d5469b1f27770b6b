"""Run folders: records, checkpoints, resuming, several processes, and loading the models of runs."""
