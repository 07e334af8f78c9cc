"""What was measured on this machine or imported: rows, comparison, drift, exchange files."""
