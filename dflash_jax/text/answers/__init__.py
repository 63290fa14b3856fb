"""What an answer's text is made of, told apart as it comes: thoughts, text, and calls of tools in the forms of Qwen's templates."""
