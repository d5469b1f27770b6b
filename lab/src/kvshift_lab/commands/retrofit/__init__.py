"""`kvshift retrofit`: adding KV shift to a pretrained model."""
