"""What is refused: arguments and their combinations, before anything runs."""
