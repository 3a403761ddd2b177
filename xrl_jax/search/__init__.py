"""Searches that need no training. Adding one is a module here and an entry in `strategies`."""
