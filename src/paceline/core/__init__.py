"""Scheduling: blocks, prefix cache, who runs next, when a sequence ends. Standard library only."""
