"""The gradient of each operation's parameters: one function and one row in `table.py` for each."""
