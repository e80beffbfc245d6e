"""Hardware and software of this machine, inspected without starting a program."""
