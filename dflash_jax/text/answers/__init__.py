"""Streaming parsers of answers: reasoning, text, and tool calls in the forms of Qwen's templates."""
