"""A call of a module becomes operations."""
