"""Opening a model's files: safetensors folders and GGUF files, and fetching them."""
