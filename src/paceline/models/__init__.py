"""Model definitions against the operations, and the loading of their weights."""
