"""What comparisons of recordings look like: text, pictures and pages."""
