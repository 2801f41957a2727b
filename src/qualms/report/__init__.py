"""Tables of rows, and HTML pages of scored images, pixels and texts."""
