"""Modules that all parts of the lab use and that depend on none of them: errors, messages, seeds, files, statistics."""
