"""Level 2: models for Hugging Face transformers. Importing a family registers it with the Auto classes."""
