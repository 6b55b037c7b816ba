"""Model, loss and batch -> Program: Dynamo, AOTAutograd, and what is kept of both on disk."""
