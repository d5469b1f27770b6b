"""Text for language models: bundled corpus, local files, hub datasets; tokenizer; sequences of tokens."""
