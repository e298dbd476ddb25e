"""The choice of each sequence's next token."""
