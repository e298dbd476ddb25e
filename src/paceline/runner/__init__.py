"""The model runner: executes a plan, returns a result."""
