"""The operations that a processor offers, and their implementations."""
