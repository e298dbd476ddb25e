"""The step loop: where scheduler and runner meet, and what their callers see."""
