"""For people who sit in front of it: conversations."""
