"""Nothing in here is a test, or has doctests: the gallery is used by tests elsewhere."""

collect_ignore_glob = ["*.py", "*/*.py"]
