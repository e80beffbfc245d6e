"""Who started this process, and how a job of several processes ends."""
