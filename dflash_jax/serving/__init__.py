"""Serving for many callers at once: the async API, and the server over it."""
