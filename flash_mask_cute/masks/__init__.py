"""What is visible: mask rules as plain arithmetic, free of architecture and direction."""
