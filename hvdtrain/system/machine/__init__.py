"""What is on this machine, read without starting anything."""
