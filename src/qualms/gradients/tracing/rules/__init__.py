"""What follows an operation: one function, and one row in the table, for each kind."""
