"""What people use: the offline LLM, the OpenAI-compatible server, the command line."""
