"""Pictures in prompts: read and cut into patches, made rows of the text model's width, and placed among a prompt's tokens."""
