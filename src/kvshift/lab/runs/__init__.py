"""A run's folder: what is recorded, checkpoints, resuming, several processes; loading what a run has made."""
