"""What a module holds beside its operations, and how it is exchanged and put back."""
