"""Interactive use: conversations, and texts shown as they come."""
