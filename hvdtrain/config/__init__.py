"""The options of the trainers, and the table of strategies."""
