"""Errors, messages and seeds: what every part of the lab needs, and which needs none of them."""
