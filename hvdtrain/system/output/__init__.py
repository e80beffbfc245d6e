"""What people and programs read: texts, tables, plots, results."""
