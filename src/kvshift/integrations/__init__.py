"""Integrations with programs that run models with KV shift. None of these packages imports another."""
