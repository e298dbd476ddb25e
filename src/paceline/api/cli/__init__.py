"""The ``paceline`` command."""
