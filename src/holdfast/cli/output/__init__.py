"""What commands print: tables, one lock, text that is safe on a terminal."""
