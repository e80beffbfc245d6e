"""Base of library and commands: processes, hardware and output."""
