"""Are four numbers per head enough? KV shift beside what production models spend four per channel on, at equal size."""
