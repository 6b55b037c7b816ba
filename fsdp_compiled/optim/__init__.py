"""A torch.optim optimizer as rules that update flat shards, and its hyperparameters."""
