"""Text for language models: bundled corpora, local files, hub datasets, tokenizers and packed sequences."""
