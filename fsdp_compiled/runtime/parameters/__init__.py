"""Parameters that are live: tensors over the shards."""
