"""The language models that many tables and figures of the paper share."""
