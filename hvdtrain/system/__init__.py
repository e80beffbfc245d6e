"""What library and commands stand on: this process, this machine, and what is printed."""
