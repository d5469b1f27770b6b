"""Models with KV shift in TransformerLens: `kvshift.integrations.lens.adapters.bridge`. See docs/analyze.md."""
