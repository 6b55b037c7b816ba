"""What a person holds: a sharded model, its programs and its state."""
