"""The OpenAI-compatible HTTP interface: what the routes accept, and the shapes they answer with."""
