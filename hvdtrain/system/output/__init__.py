"""Output for users and programs: texts, tables, plots, results."""
