"""Between text and tokens: tokenizers, chat templates, detokenising, stop strings."""
